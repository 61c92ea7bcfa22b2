"""How the wall time of a run's processes is divided, and what reports show of it."""

import time

import pytest

from trainer.monitoring import activity, goodput
from trainer.monitoring.activity import Activity, doing, running


def entry(began, base, step, marks, complete=False, **seconds):
    """Returns the record of a process; `marks` are (step, seconds of stepping until then)."""
    states = [[base, {"starting": 10.0}]]
    states += [[at, {"starting": 10.0, "stepping": spent}] for at, spent in marks]
    whole = {"starting": 10.0, **seconds}
    return {
        **{"began": began, "from": base, "step": step, "marks": states},
        **{"seconds": whole, "complete": complete},
    }


def spent(*entries):
    found = goodput.shares(entries)
    end = entries[-1]["began"] + sum(entries[-1]["seconds"].values())
    assert sum(found.values()) == pytest.approx(end - entries[0]["began"])
    return {kind: seconds for kind, seconds in found.items() if seconds}


def test_a_process_alone_loses_nothing():
    alone = entry(100.0, 0, 7, [(5, 50.0)], stepping=70.0, evaluating=20.0)
    assert spent(alone) == {"stepping": 70.0, "evaluating": 20.0, "starting": 10.0}


def test_work_after_the_state_from_which_the_next_resumed_is_lost():
    first = entry(100.0, 0, 8, [(5, 50.0)], stepping=80.0)  # ends at 190
    second = entry(200.0, 5, 9, [], stepping=40.0)  # ends at 250
    found = spent(first, second)
    assert found == {"stepping": 90.0, "starting": 20.0, "lost": 30.0, "down": 10.0}
    # The second has saved nothing, so all but its start is lost once a third resumes.
    found = spent(first, second, entry(260.0, 5, 6, [], stepping=5.0))
    assert found == {"stepping": 55.0, "starting": 30.0, "lost": 70.0, "down": 20.0}


def test_a_process_that_saved_its_end_loses_nothing():
    first = entry(0.0, 0, 8, [(8, 80.0)], complete=True, stepping=80.0, evaluating=3.0)
    found = spent(first, entry(93.0, 8, 9, [], stepping=9.0))
    assert found == {"stepping": 89.0, "evaluating": 3.0, "starting": 20.0}


def test_a_rewind_takes_what_earlier_processes_did():
    first = entry(0.0, 0, 10, [(5, 50.0), (10, 99.0)], complete=True, stepping=99.0)
    second = entry(109.0, 10, 20, [(20, 80.0)], complete=True, stepping=80.0)
    back = entry(199.0, 5, 6, [], stepping=1.0)
    found = spent(first, second, back)
    # Of the second, nothing is left.
    assert found == {"stepping": 51.0, "starting": 20.0, "lost": 49.0 + 90.0}


def test_clocks_that_disagree_make_no_negative_time():
    first, second = entry(100.0, 0, 1, [], True, stepping=5.0), entry(50.0, 1, 2, [], stepping=5.0)
    assert goodput.shares([first, second])["down"] == 0


def test_the_innermost_activity_counts_and_compilations_count_once():
    start, now = time.monotonic(), Activity()
    with running(now), doing(activity.STEPPING):
        with doing(activity.SAVING, "saving checkpoint_3"):
            time.sleep(0.02)
            assert now.now().words == "saving checkpoint_3"
        begin = time.monotonic()
        time.sleep(0.02)
        now.compiled(0.01)  # inside of what follows
        now.compiled(time.monotonic() - begin)
    seconds = now.seconds()
    assert set(seconds) == {"starting", "stepping", "saving", "compiling"}
    assert sum(seconds.values()) <= time.monotonic() - start
    assert 0.02 <= seconds["compiling"] <= time.monotonic() - begin
    assert all(each >= -1e-3 for each in seconds.values())
    with doing(activity.SAVING):  # outside of a run
        pass
    assert now.seconds()["saving"] == seconds["saving"]


def test_jax_tells_what_it_compiles():
    import jax

    activity.count_compilations()
    with running(now := Activity()):
        jax.jit(lambda x: x * 3 + 1)(1.0)
    assert now.seconds()["compiling"] > 0
