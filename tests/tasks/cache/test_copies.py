"""Local copies of the shards of a remote cache."""

import collections
import contextlib
import errno
import gc
import hashlib
import os
import tempfile
import threading
import time
import uuid

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tasks.cache import copies
from tasks.cache.manifest import shard_file
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tests.support.window_caches import COUNT, Cache, check, expected, make, read_from_threads


@pytest.fixture
def cache(tmp_path):
    return make(tmp_path / "cache")


@pytest.fixture
def remote(cache, tmp_path, monkeypatch):
    """A cache in a store that counts reads and can be made to fail."""
    monkeypatch.setenv("PALIMPSEST_RETRY_DELAY", "0.01")
    url = f"memory://{uuid.uuid4().hex}"
    store = fsspec.filesystem("memory")
    store.put(cache.folder, url, recursive=True)
    read = collections.Counter()
    failures = []
    original = MemoryFileSystem.cat_file
    lock = threading.Lock()

    def cat_file(self, path, start=None, end=None, **kwargs):
        with lock:
            if failures:
                raise failures.pop()
        data = original(self, path, start, end, **kwargs)
        read[path.rpartition("/")[2]] += len(data)
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    elsewhere = Cache(url, cache.manifest, cache.streams)
    elsewhere.store, elsewhere.read, elsewhere.failures = store, read, failures
    elsewhere.local = tmp_path / "local"
    elsewhere.sizes = [shard.bytes for shard in cache.windows(60)._rows.files]
    yield elsewhere
    store.rm(url, recursive=True)


def copied(remote):
    """Returns (bytes, names) of the existing copies."""
    sizes = {}
    for path in remote.local.rglob("*"):
        # A copy in the making has another name by the time it is looked at.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                sizes[path] = path.stat().st_size
    return sum(sizes.values()), {path.name for path in sizes}


def test_a_remote_shard_is_copied_once_for_many_readers(remote, monkeypatch):
    monkeypatch.setattr(copies, "_PART_BYTES", 1000)
    windows = remote.windows(60, local_dir=str(remote.local))
    assert not remote.read
    read_from_threads(remote, windows)
    assert {*remote.read} == {
        shard_file("train", kind, shard, COUNT)
        for kind in ("tfrecord", "rows")
        for shard in (0, 1, 2, 4)
    }
    assert (
        copied(remote)[0]
        == sum(remote.read.values())
        == sum(remote.sizes[shard] for shard in (0, 1, 2, 4))
    )
    assert len(list(remote.local.iterdir())) == 1


@pytest.mark.processes
def test_copies_stay_in_local_dir_and_leave_the_temporary_folder(remote, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    windows = remote.windows(60)
    windows.read(np.array([3]))
    assert len(list(tmp_path.glob(f"{copies.FOLDER_PREFIX}*"))) == 1
    del windows
    gc.collect()
    assert not list(tmp_path.glob(f"{copies.FOLDER_PREFIX}*"))

    windows = remote.windows(60, local_dir=str(remote.local))
    read_from_threads(remote, windows)
    del windows
    gc.collect()
    (folder,) = remote.local.iterdir()
    spoilt = folder / shard_file("train", "tfrecord", 0, COUNT)
    data = bytearray(spoilt.read_bytes())
    data[5] ^= 1
    spoilt.write_bytes(data)
    (folder / shard_file("train", "rows", 1, COUNT)).unlink()
    (folder / "of-another-cache").write_bytes(b"x")
    remote.read.clear()
    windows = remote.windows(60, local_dir=str(remote.local))
    read_from_threads(remote, windows)
    assert set(remote.read) == {
        shard_file("train", "tfrecord", 0, COUNT),
        shard_file("train", "tfrecord", 1, COUNT),
        shard_file("train", "rows", 1, COUNT),
    }
    assert list(remote.local.iterdir()) == [folder]
    assert not (folder / "of-another-cache").exists()
    room = sum(remote.sizes[shard] for shard in (0, 1, 2, 4))
    assert copied(remote)[0] == room

    # The room of the next process may be less.
    del windows
    gc.collect()
    small = remote.windows(60, local_dir=str(remote.local), local_bytes=max(remote.sizes))
    small.read(np.array([3]))
    small.read(np.array([55]))
    assert copied(remote)[0] <= max(remote.sizes)


def test_copies_stay_within_local_bytes_and_the_least_recently_read_is_deleted(remote):
    room = remote.sizes[0] + remote.sizes[1]
    windows = remote.windows(60, local_dir=str(remote.local), local_bytes=room)
    assert remote.sizes[4] > remote.sizes[1]
    firsts = {0: 0, 1: 50, 4: 62}
    for shard, left in ((0, {0}), (1, {0, 1}), (0, {0, 1}), (4, {4}), (1, {1, 4}), (0, {0, 1})):
        windows.read(np.array([firsts[shard]]))
        size, there = copied(remote)
        assert size <= room
        assert there == {
            shard_file("train", kind, number, COUNT)
            for kind in ("tfrecord", "rows") for number in left
        }  # fmt: skip
    assert windows.bytes == sum(remote.sizes)


def test_threads_share_space_for_one_copy(remote):
    windows = remote.windows(60, local_dir=str(remote.local), local_bytes=max(remote.sizes))
    over = threading.Event()
    largest = []

    def watch():
        while not over.is_set():
            try:
                largest.append(copied(remote)[0])
            except FileNotFoundError:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    read_from_threads(remote, windows, threads=4, rounds=10)
    over.set()
    watcher.join()
    assert 0 < max(largest) <= max(remote.sizes)


def test_a_shard_larger_than_local_bytes_is_rejected_at_once(remote):
    size = max(remote.sizes)
    with pytest.raises(UserError, match=rf"{size:,} bytes.*{size - 1:,}.*data\.local_bytes"):
        remote.windows(60, local_bytes=size - 1)


def test_failed_reads_are_retried(remote):
    remote.failures += [ConnectionError("reset"), TimeoutError(), ConnectionError("again")]
    windows = remote.windows(60, local_dir=str(remote.local))
    check(windows.read(np.array([3])), [expected(remote, 60, False)[3]], 60)


@pytest.mark.parametrize("kind", ["tfrecord", "rows"])
def test_a_copy_matches_the_manifest_or_does_not_exist(remote, kind):
    windows = remote.windows(60, local_dir=str(remote.local))
    url = files.join(remote.folder, shard_file("train", kind, 0, COUNT))
    whole = remote.store.cat(url)

    def refused(message):
        for _ in range(2):
            with pytest.raises(UserError, match=message):
                windows.read(np.array([3]))
            assert copied(remote)[0] == 0

    changed = bytearray(whole)
    changed[-1] ^= 1
    remote.store.pipe(url, bytes(changed))
    wanted = hashlib.sha256(whole).hexdigest()
    refused(rf"{kind}-00000.*sha256 {hashlib.sha256(changed).hexdigest()}.*says {wanted}")
    remote.store.pipe(url, whole[:-1])
    refused(rf"{kind}-00000.* has {len(whole) - 1:,} bytes but the manifest says {len(whole):,}")
    remote.store.rm(url)
    refused(rf"{kind}-00000.* is missing")
    remote.store.pipe(url, whole)
    check(windows.read(np.array([3])), [expected(remote, 60, False)[3]], 60)


def test_prefetched_shards_are_copied_before_they_are_read(remote):
    room = remote.sizes[0] + remote.sizes[1]
    windows = remote.windows(60, local_dir=str(remote.local), local_bytes=room)
    windows.prefetch([(50, 61), (0, 50), (7, 7)])  # shards 1 and 0
    until = time.monotonic() + 20
    while copied(remote)[0] < room and time.monotonic() < until:
        time.sleep(0.01)
    before = dict(remote.read)
    windows.read(np.arange(61))
    assert dict(remote.read) == before
    # Shard 1 was read first and is used again by the hint, so that 0 makes room for 4.
    windows.prefetch([(50, 61), (62, 63)])
    name = shard_file("train", "tfrecord", 4, COUNT)
    while name not in copied(remote)[1] and time.monotonic() < until:
        time.sleep(0.01)
    there = copied(remote)[1]
    assert shard_file("train", "tfrecord", 1, COUNT) in there
    assert shard_file("train", "tfrecord", 0, COUNT) not in there


def test_an_error_of_a_prefetch_is_raised_by_the_read(remote, caplog):
    windows = remote.windows(60, local_dir=str(remote.local))
    url = files.join(remote.folder, shard_file("train", "tfrecord", 0, COUNT))
    remote.store.rm(url)
    windows.prefetch([(0, 61)])
    until = time.monotonic() + 20
    while "00000-of-00005 was not copied in advance" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(UserError, match="is missing"):
        windows.read(np.array([0]))


def test_unused_copies_are_deleted_after_a_day_unless_a_process_holds_them(remote):
    living = remote.windows(60, local_dir=str(remote.local))
    living.read(np.array([0]))
    before = copied(remote)
    abandoned = remote.local / f"{copies.FOLDER_PREFIX}abandoned"
    fresh = remote.local / f"{copies.FOLDER_PREFIX}fresh"
    other = remote.local / "another"
    for folder in (abandoned, fresh, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 10)
    for folder in (abandoned, other):
        os.utime(folder, (time.time() - 100_000,) * 2)
    windows = remote.windows(60, local_dir=str(remote.local))
    windows.read(np.array([0]))
    assert not abandoned.exists()
    assert other.exists()
    assert fresh.exists()
    assert copied(remote)[0] == 2 * before[0] + 20
    living.read(np.arange(61))


def test_a_short_write_is_continued(remote, monkeypatch):
    """A nearly full disk takes a part of what is written, without an error."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:100], at))
    read_from_threads(remote, remote.windows(60), rounds=1)


def test_a_full_disk_is_named(remote, monkeypatch):
    def write(file, data, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(UserError, match=r"tfrecord\S+: the disk is full"):
        remote.windows(60, local_dir=str(remote.local)).read(np.array([3]))
