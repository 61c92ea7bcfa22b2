"""Looking at files takes a small share of a core, however many there are."""

import time

from tasks.terminal import polling


def test_long_looks_are_rare(monkeypatch):
    monkeypatch.setattr(polling, "_LOCAL_SECONDS", 0.001)
    looks = []

    def look():
        looks.append(None)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    with polling.polling(look, remote=False):
        time.sleep(0.6)
    assert 1 <= len(looks) <= 2


def test_short_looks_are_frequent(monkeypatch):
    monkeypatch.setattr(polling, "_LOCAL_SECONDS", 0.001)
    looks = []
    with polling.polling(lambda: looks.append(None), remote=False):
        while len(looks) < 5:
            time.sleep(0.01)
