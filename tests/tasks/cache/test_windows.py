"""Windows are those written, whatever the order they are read in, the threads and the damage."""

import dataclasses
import gc
import itertools
import os
import resource
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.cache import records, shards
from tasks.cache.manifest import LINEAGE_COLUMNS, CacheManifest, shard_file
from tasks.cache.windows import Windows
from tasks.terminal.command_line import UserError
from tests.support import plain_records
from tests.support.window_caches import COUNT, SIZES, check, expected, make, read_from_threads


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    return {rows: make(folder / str(rows), row_tokens=rows) for rows in (7, 100, 568)}


@pytest.fixture
def cache(tmp_path):
    return make(tmp_path / "cache")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([7, 100, 568]),
    st.one_of(st.sampled_from([1, 7, 100, 568, 1136]), st.integers(1, 4000)),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_windows_read_in_any_order_are_those_written(caches, rows, length, keep, across, data):
    cache = caches[rows]
    windows = cache.windows(length, keep_tails=keep, across_shards=across)
    all_windows = expected(cache, length, keep, across)
    assert len(windows) == len(all_windows)
    assert windows.unread_tokens == sum(SIZES) - sum(map(len, all_windows))
    places = st.integers(0, max(0, len(all_windows) - 1))
    indices = data.draw(st.lists(places, max_size=30)) if all_windows else []
    check(windows.read(np.array(indices, np.int64)), [all_windows[i] for i in indices], length)


def test_rows_are_the_windows_of_best_fit(tmp_path):
    cache = make(tmp_path / "cache", "best_fit", 64)
    windows = cache.windows(80)
    rows = []
    for shard in range(COUNT):
        with open(cache.path("tfrecord", shard), "rb") as file:
            data = file.read()
        index = np.load(cache.path("rows", shard))
        bounds = [*index["offset"].tolist(), len(data)]
        for begin, end in itertools.pairwise(bounds):
            rows.append(records.decode_row(records.unframe(data[begin:end])).targets)
    assert len({len(row) for row in rows}) > 1
    order = np.random.default_rng(0).permutation(len(windows))
    check(windows.read(order), [rows[i] for i in order], 80)
    (place,) = windows.where(len(rows) - 1)
    assert place.tokens == len(rows[-1])
    assert (place.position, place.row) == (0, int(index.shape[0]) - 1)
    with pytest.raises(UserError, match="row_tokens=63"):
        cache.windows(63)


@pytest.mark.parametrize("length", [100, 37, 568])
def test_a_window_is_located_with_its_documents(caches, length):
    from pyarrow import parquet

    cache = caches[100]
    windows = cache.windows(length, keep_tails=True)
    shards = []
    for index in range(len(windows)):
        tokens_WN, lengths_W = windows.read(np.array([index]))
        read = []
        for place in windows.where(index):
            begin = place.row * 100 + place.position
            read.append(cache.streams[place.shard][begin : begin + place.tokens])
            assert place.path == cache.path("tfrecord", place.shard)
            lineage = parquet.read_table(place.documents)
            assert tuple(lineage.column_names) == LINEAGE_COLUMNS
            begins = np.array(lineage["row"]) * 100 + np.array(lineage["position"])
            document = np.searchsorted(begins, begin, side="right") - 1
            assert lineage["id"][document].as_py() == f"{place.shard}-{document}"
            end = begins[document] + lineage["tokens"][document].as_py()
            assert begins[document] <= begin < end
        assert np.concatenate(read).tolist() == tokens_WN[0, : int(lengths_W[0])].tolist()
        shards.append(len(read))
    # Some windows end in the next shard, one of them behind a shard shorter than itself.
    assert max(shards) == (3 if length == 568 else 2)


def test_shards_are_opened_only_when_read(cache):
    for name in os.listdir(cache.folder):
        os.unlink(os.path.join(cache.folder, name))
    windows = cache.windows(100)
    assert len(windows) == 55
    assert [(place.shard, place.row, place.tokens) for place in windows.where(31)] == [(1, 1, 100)]
    assert [(place.shard, place.row) for place in windows.where(37)] == [(2, 0), (4, 0)]
    assert windows.blocks(1 << 30).tolist() == [0, 55]


def damage(path, place, bits=1):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bits]))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_affects_only_reads_of_its_row(caches, data):
    cache = caches[100]
    path = cache.path("tfrecord", 0)
    offsets = np.load(cache.path("rows", 0))["offset"]
    place = data.draw(st.integers(0, os.path.getsize(path) - 1))
    row = int(np.searchsorted(offsets, place, side="right")) - 1
    bits = data.draw(st.integers(1, 255))
    damage(path, place, bits)
    try:
        windows = cache.windows(150)
        touching = {row * 100 // 150, (row * 100 + 99) // 150}
        others = np.array([n for n in range(len(windows)) if n not in touching])
        check(windows.read(others), [expected(cache, 150, False)[n] for n in others], 150)
        for window in touching:
            with pytest.raises(UserError, match=rf"train\.tfrecord-00000-of.* in row {row}: .*run"):
                windows.read(np.array([40 % len(windows), window, 0, 3]))
    finally:
        damage(path, place, bits)


def test_changed_files_are_named(cache):
    records_path, index_path = cache.path("tfrecord", 0), cache.path("rows", 0)

    def wrong(message, first=29):
        with pytest.raises(UserError, match=message):
            cache.windows(100).read(np.arange(first, 30))

    with open(records_path, "rb") as file:
        whole = file.read()
    for missing in (1, 100):
        with open(records_path, "wb") as file:
            file.write(whole[:-missing])
        for first in (29, 0):
            wrong(r"tfrecord-00000.* corrupt in row 29: the file ends inside it; delete", first)
    os.unlink(records_path)
    wrong(r"tfrecord-00000.* is missing: run pipeline\.build again")

    index = np.load(index_path)
    with open(records_path, "wb") as file:
        file.write(whole)
    for offset in (0, 5, len(whole) + 1, 2**63 + 1):
        shifted = index.copy()
        shifted["offset"][29] = offset
        np.save(index_path, shifted)
        wrong(r"tfrecord-00000.* is corrupt in row 29")
    np.save(index_path, index[:-1])
    wrong(r"rows-00000.* has 29 rows but the manifest says 30")
    np.save(index_path, np.zeros(30))
    wrong(r"rows-00000.* is not a row index of this version")
    with open(index_path, "wb") as file:
        file.write(b"nothing of the kind")
    wrong(r"rows-00000.* is not a row index \(.*run pipeline\.build again")
    os.unlink(index_path)
    wrong(r"rows-00000.* is missing")


def test_a_row_with_a_wrong_number_of_tokens_is_rejected(cache):
    """Like a shard left by another build: all checksums are right, but the content is wrong."""
    path = cache.path("tfrecord", 1)
    index = np.load(cache.path("rows", 1))
    with open(path, "rb") as file:
        data = file.read()
    begin, end = int(index["offset"][2]), int(index["offset"][3])
    row = records.decode_row(records.unframe(data[begin:end]))
    other = plain_records.frame(plain_records.encode_row(row.targets[1:], np.zeros(0, np.int32)))
    with open(path, "wb") as file:
        file.write(data[:begin] + other + data[end:])
    change = len(other) - (end - begin)
    index["offset"][3:] = index["offset"][3:].astype(np.int64) + change
    np.save(cache.path("rows", 1), index)
    entry = cache.manifest.splits["train"][1].files
    name = shard_file("train", "tfrecord", 1, COUNT)
    entry[name] = dataclasses.replace(entry[name], bytes=entry[name].bytes + change)
    with pytest.raises(UserError, match=r"00001-of.*row 2: it has 99 tokens, but should have 100"):
        cache.windows(100).read(np.array([32]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda shards, plan: (shards[1:], plan), "lacks"),
        (lambda shards, plan: (shards, dataclasses.replace(plan, packing="concot")), "unknown"),
        (
            lambda shards, plan: ((dataclasses.replace(shards[0], rows=3), *shards[1:]), plan),
            "do not fill",
        ),
    ],
)
def test_an_edited_manifest_is_refused(caches, change, says):
    cache = caches[100]
    found, plan = change(cache.manifest.splits["train"], cache.manifest.plan)
    with pytest.raises(UserError, match=rf"manifest\.json is damaged \(.*{says}"):
        Windows(cache.folder, CacheManifest(plan, {"train": found}, {}), "train", 100)


def open_files(folder):
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).startswith(folder) for link in links if os.path.exists(link))


def test_few_shards_are_open_and_all_are_closed_at_the_end(cache):
    windows = cache.windows(50)
    windows._rows.shards = shards.Shards(windows._rows.files, open_shards=2)
    for _ in range(3):
        windows.read(np.arange(len(windows)))
        assert 0 < open_files(cache.folder) <= 2 * 2
    del windows
    gc.collect()
    assert not open_files(cache.folder)


def test_open_caches_share_the_descriptors(cache, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))  # 8 open shards a cache
    several = [cache.windows(60) for _ in range(6)]
    for _ in range(2):
        for windows in several:
            windows.read(np.arange(len(windows)))
    counts = [len(windows._rows.shards._open) for windows in several]
    assert max(counts) > 2
    assert sum(counts) <= 2 * 8 + 4  # the last one's were not trimmed yet


def test_threads_do_not_interfere(cache):
    windows = cache.windows(60)
    windows._rows.shards = shards.Shards(windows._rows.files, open_shards=1)
    read_from_threads(cache, windows)


@given(st.sampled_from([50, 900, 2500]), st.data())
def test_blocks_are_as_many_whole_shards_as_fit(caches, length, data):
    cache = caches[7]
    windows = cache.windows(length, across_shards=False)
    sizes = [shard.bytes for shard in windows._rows.files]
    with pytest.raises(UserError, match=rf"data\.block_bytes to {max(sizes)} or more"):
        windows.blocks(max(sizes) - 1)
    block_bytes = data.draw(st.integers(max(sizes), sum(sizes) + 1))
    expected, size, first = [0], 0, 0
    for shard, stream in zip(sizes, cache.streams, strict=True):
        if size + shard > block_bytes:
            expected.append(first)
            size = 0
        size += shard
        first += len(stream) // length
    blocks = windows.blocks(block_bytes)
    assert blocks.dtype == np.int64
    # A block of shards without a window is none.
    assert blocks.tolist() == sorted({*expected, len(windows)})


@given(st.sampled_from([50, 900, 2500]), st.data())
def test_the_shards_that_a_block_reads_fit_into_it(caches, length, data):
    cache = caches[7]
    windows = cache.windows(length)
    shards = [{place.shard for place in windows.where(index)} for index in range(len(windows))]

    def size(first, last):
        read = set().union(*shards[first:last])
        # Those between are read or have no tokens.
        between = range(min(read), max(read) + 1)
        return sum(windows._rows.files[shard].bytes for shard in between)

    total = sum(shard.bytes for shard in windows._rows.files)
    block_bytes = data.draw(st.integers(1, total + 1))
    try:
        blocks = windows.blocks(block_bytes)
    except UserError as error:
        least = int(str(error).rpartition("set --data.block_bytes to ")[2].split()[0])
        assert block_bytes < least
        blocks = windows.blocks(block_bytes := least)
    assert blocks.tolist() == sorted({0, *blocks.tolist(), len(windows)})
    assert all(size(first, last) <= block_bytes for first, last in itertools.pairwise(blocks))
    asked = []
    windows._rows.shards = types.SimpleNamespace(prefetch=lambda numbers: asked.extend(numbers))
    windows.prefetch([(0, 1), (len(windows) - 1, len(windows))])
    assert set(asked) >= shards[0] | shards[-1]
