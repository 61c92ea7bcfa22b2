"""Network reads with retries: nothing is lost or read twice, and every wait ends."""

import gzip
import io
import random
import threading

import fsspec
import pytest

from tasks.reading import sources
from tasks.storage import ranges, retries, store
from tasks.terminal.command_line import UserError

DATA = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setenv("PALIMPSEST_RETRY_DELAY", "0.001")


@pytest.mark.parametrize("seed", range(5))
def test_a_file_is_read_exactly_despite_faults(seed):
    chance = random.Random(seed)

    def fetch(start, stop):
        while start < stop:
            match chance.randrange(6):
                case 0:
                    raise ConnectionResetError("gone")
                case 1:
                    raise retries.HttpError(503, {})
                case 2:
                    return  # truncated
            size = min(stop - start, chance.randrange(1, 500))
            yield DATA[start : start + size]
            start += size

    with ranges.open_ranges("a", len(DATA), fetch, 1000) as file:
        for _ in range(30):
            place, size = chance.randrange(len(DATA) + 50), chance.randrange(3000)
            file.seek(place)
            assert file.read(size) == DATA[place : place + size]
        file.seek(-10, io.SEEK_END)
        assert file.read() == DATA[-10:]


class OfflineModeIsEnabled(ConnectionError):
    """Stands for huggingface_hub's error of a user who turned the network off."""


@pytest.mark.google
def test_a_truncated_body_is_retried():
    import aiohttp
    from aiohttp.http_exceptions import ContentLengthError

    error = aiohttp.ClientPayloadError("not completed")
    error.__cause__ = ContentLengthError("Not enough data")
    assert error.__cause__.code == 400  # which no server sent
    test_only_transient_errors_are_retried(error, 3)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ConnectionResetError("gone"), 3),
        (TimeoutError(), 3),
        (retries.HttpError(429, {}), 3),
        (retries.HttpError(503, {}), 3),
        (retries.HttpError(404, {}), 1),
        (FileNotFoundError("gone"), 1),
        (PermissionError("no"), 1),
        (OfflineModeIsEnabled(), 1),
        (ValueError("bug"), 1),
        (UserError("no"), 1),
    ],
)
def test_only_transient_errors_are_retried(error, tries):
    asked = []

    def action():
        asked.append(1)
        if len(asked) < 3:
            raise error
        return "done"

    try:
        # An unrelated error that is being handled must not matter.
        raise FileNotFoundError
    except FileNotFoundError:
        if tries == 3:
            assert retries.with_retries("a", action) == "done"
        else:
            with pytest.raises(type(error)):
                retries.with_retries("a", action)
    assert len(asked) == tries


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "7"}, {"retry-after": "7"}, {"ratelimit": '"api";r=0;t=7'}]
)
def test_retry_after_is_respected(monkeypatch, headers):
    waits = []
    monkeypatch.setattr(retries.time, "sleep", waits.append)
    errors = [retries.HttpError(429, headers)]
    retries.with_retries("a", lambda: errors and exec("raise error", {"error": errors.pop()}))
    assert waits == [7]


def test_the_time_limit_is_for_time_without_progress(monkeypatch):
    monkeypatch.setenv("PALIMPSEST_RETRY_SECONDS", "100")
    now = [0.0]
    monkeypatch.setattr(retries.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retries.time, "sleep", lambda wait: now.__setitem__(0, now[0] + wait))
    monkeypatch.setenv("PALIMPSEST_RETRY_DELAY", "40")
    done = []

    def action():
        done.append(1)
        if len(done) < 20:
            raise ConnectionResetError("https://x/y?signature=abc gone, hf_abc")

    retries.with_retries("a", action, progress=lambda: len(done))
    assert now[0] > 300
    done.clear()
    with pytest.raises(retries.Unreachable, match="a cannot be reached: no data for 100") as caught:
        retries.with_retries("a", action)
    assert str(caught.value).startswith(f"{caught.value.why}; finished work is kept")
    assert "signature" not in str(caught.value)
    assert "hf_abc" not in str(caught.value)


def test_any_store_is_retried_and_its_files_checked(monkeypatch):
    fs = fsspec.filesystem("memory")
    fs.pipe("/flaky/a.txt", b"one\ntwo\n")
    usual, failures = fs.cat_file, iter([True, False, True, False, False])

    def cat_file(path, **options):
        if next(failures):
            raise ConnectionResetError("gone")
        return usual(path, **options)

    try:
        corpus = sources.resolve(sources.parse("text:memory://flaky/*.txt?validation=0"))
        monkeypatch.setattr(fs, "cat_file", cat_file)
        ((_, batch),) = sources.read(corpus, corpus.pieces[0])
        assert batch.column("text").to_pylist() == ["one", "two"]
        fs.pipe("/flaky/a.txt", b"one\nthree\n")
        with pytest.raises(UserError, match=r"a\.txt has changed .*it had 8 bytes and now has 10"):
            list(sources.read(corpus, corpus.pieces[0]))
    finally:
        fs.rm("/flaky", recursive=True)


@pytest.mark.google
def test_an_object_that_is_decompressed_on_its_way_is_named(gcs):
    packed = gzip.compress(b"a text\n" * 100)
    gcs.store.put("bucket", "a.jsonl", packed, {"contentEncoding": "gzip"}, {})
    for listed in (None, (len(packed), "")):
        with pytest.raises(UserError, match=r"a\.jsonl has Content-Encoding: gzip, .* end in \.gz"):
            store.Store("gs://bucket/a.jsonl").open(listed).read()


def serve(asked):
    def fetch(start, stop):
        asked.append((start, stop))
        yield DATA[start:stop]

    return fetch


def test_expected_spans_are_fetched_before_they_are_read_and_once():
    asked = []
    with ranges.open_ranges("a", len(DATA), serve(asked), 0) as file:
        spans = [(at, at + 100) for at in range(1000, 2000, 100)]
        file.expect(spans)
        file._asked[spans[0]].result()
        assert asked  # nothing was read
        for at in (1500, 1000):  # two readers side by side
            file.seek(at)
            assert file.read(400) == DATA[at : at + 400]
        file.seek(900)
        assert file.read(100) == DATA[900:1000]  # what is not expected is asked for
        for at, size in ((1400, 100), (1900, 20_000)):
            file.seek(at)
            assert file.read(size) == DATA[at : at + size]
    assert sorted(asked) == sorted([*spans, (900, 1000), (2000, 21_900)])


def test_few_spans_are_held():
    asked = []
    with ranges.open_ranges("a", len(DATA), serve(asked), 0) as file:
        file.expect([(at, at + 100) for at in range(0, 20_000, 100)])
        for span in [*file._asked]:
            file._asked[span].result()
        assert len(asked) == ranges.CONNECTIONS + 1


def test_a_fault_of_an_expected_span_is_raised_where_it_is_read():
    def fetch(start, stop):
        raise UserError("gone")
        yield b""

    with ranges.open_ranges("a", len(DATA), fetch, 0) as file:
        file.expect([(0, 100)])
        with pytest.raises(UserError, match="gone"):
            file.read(10)


def test_spans_share_what_is_read_among_connections_in_the_order_of_reading():
    mb = 1 << 20
    assert ranges.spans([[(5, 100), (200, 300)]]) == [(5, 100), (200, 300)]
    assert ranges.spans([[(5, 100)], [(100, 300)]]) == [(5, 300)]
    two = [(0, 40 * mb), (40 * mb, 80 * mb)]  # of one row group, side by side
    found = ranges.spans([two])
    assert sorted(found)[0][0] == 0
    assert sum(stop - start for start, stop in found) == 80 * mb
    assert all(stop - start <= ranges.SPAN_BYTES for start, stop in found)
    assert [start >= 40 * mb for start, _ in found[:4]] == [False, True, False, True]


def test_a_stopped_thread_gives_up_its_retries(monkeypatch):
    monkeypatch.setenv("PALIMPSEST_RETRY_DELAY", "60")
    stop, tries = threading.Event(), []

    def action():
        tries.append(1)
        raise ConnectionResetError("gone")

    def ask():
        with retries.stopped_by(stop), pytest.raises(ConnectionResetError):
            retries.with_retries("a", action)

    thread = threading.Thread(target=ask)
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert len(tries) <= 2
