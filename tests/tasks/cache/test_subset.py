"""Taking the first part of a cache: exact in tokens, documents and shares."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from tasks.cache import subset
from tasks.cache.subset import Take
from tasks.terminal.command_line import UserError
from tests.support import window_caches

LENGTH = 64


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    made = window_caches.make(tmp_path_factory.mktemp("taking") / "concat")
    # The fixture's receipts do not count documents.
    documents = [pq.read_metadata(made.path("documents", n)).num_rows for n in range(made_count())]
    shards = tuple(
        dataclasses.replace(shard, documents=count)
        for shard, count in zip(made.manifest.splits["train"], documents, strict=True)
    )
    manifest = dataclasses.replace(made.manifest, splits={"train": shards})
    return dataclasses.replace(made, manifest=manifest)


def made_count():
    return window_caches.COUNT


def taken(cache, wanted, length=LENGTH, **reading):
    windows = cache.windows(length, **reading)
    windows.keep_first(subset.count(windows, cache.folder, cache.manifest, "train", wanted))
    return windows


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("tokens", [64, 127, 128, 3000, 3001, 3700, 5504])
def test_tokens_are_those_of_the_first_windows(cache, tokens, across):
    whole = cache.windows(LENGTH, across_shards=across)
    some = taken(cache, Take(tokens, "tokens"), across_shards=across)
    ends = whole._extents(np.arange(len(whole)))[1]
    assert len(some) == np.count_nonzero(ends <= tokens)
    if across:
        assert len(some) == tokens // LENGTH
    read, _ = some.read(np.arange(len(some)))
    assert np.array_equal(read, whole.read(np.arange(len(some)))[0])
    assert some.taken_share == len(some) / len(whole)
    assert some.unread_tokens == whole.unread_tokens
    assert some.blocks(10**6)[-1] == len(some)


def test_a_share_is_rounded_down(cache):
    whole = len(cache.windows(LENGTH))
    assert len(taken(cache, Take(0.29, ""))) == whole * 29 // 100
    assert len(taken(cache, Take(1.0, ""))) == whole


@pytest.mark.parametrize("count", [1, 17, 50, 62, 70])
def test_documents_end_where_the_next_begins(cache, count):
    lengths = []
    for shard in range(window_caches.COUNT):
        table = pq.read_table(cache.path("documents", shard))
        lengths += table.column("tokens").to_pylist()
    wanted = Take(count, "documents")
    assert len(taken(cache, wanted, 7)) == sum(lengths[:count]) // 7


def test_rows_of_best_fit_are_taken_whole(tmp_path):
    cache = window_caches.make(tmp_path / "best_fit", "best_fit", 40)
    whole = cache.windows(40)
    sizes = np.cumsum(whole.read(np.arange(len(whole)))[1])
    for tokens in (39, 40, 1000, 3000, 3650, int(sizes[-1])):
        expected = int(np.searchsorted(sizes, tokens, side="right"))
        if expected:
            assert len(taken(cache, Take(tokens, "tokens"), 40)) == expected
    with pytest.raises(UserError, match="are not stored in sequence"):
        taken(cache, Take(0, "documents"), 40)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (Take(5506, "tokens"), "has 5,505 tokens in train, not this many"),
        (Take(10**6, "documents"), "documents in train, not this many"),
        (Take(63, "tokens"), "less than one window, which has 64 tokens"),
        (Take(1e-6, ""), "less than one window"),
    ],
)
def test_more_than_there_is_and_less_than_a_window_are_refused(cache, wanted, says):
    with pytest.raises(UserError, match=says):
        taken(cache, wanted)


def test_amounts_are_parsed():
    assert subset.parse("0.25") == {"": Take(0.25, "")}
    assert subset.parse("2^29 tokens") == {"": Take(2**29, "tokens")}
    assert subset.parse("1e6tokens") == {"": Take(1e6, "tokens")}
    assert subset.parse("a: 0.5; b: 1_000 documents") == {
        "a": Take(0.5, ""),
        "b": Take(1000, "documents"),
    }
    assert subset.of_task(subset.parse("a: 0.5"), "b") is None


@pytest.mark.parametrize(
    "text", ["", "2", "0", "-1 tokens", "1.5 tokens", "5 words", "9e9999", "a: 1; a: 1", "1; a: 1"]
)
def test_what_is_no_amount_is_rejected(text):
    with pytest.raises(ValueError, match=r"amount|share|twice|write"):
        subset.parse(text)
