"""Network reads with retries: nothing is lost or read twice, and every wait ends."""

import gzip
import io
import random

import fsspec
import pytest

from tasks.reading import sources
from tasks.storage import retries, store
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

    with store.open_ranges("a", len(DATA), fetch, 1000) as file:
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
