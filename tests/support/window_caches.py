"""Caches of random tokens, and the windows that must be read of them."""

import concurrent.futures
import dataclasses
import os

import numpy as np
import pyarrow as pa

from pipeline.building import write
from tasks.cache.manifest import CacheManifest, Plan, shard_file
from tasks.cache.pack import Documents
from tasks.cache.receipts import read_receipt
from tasks.cache.windows import Windows
from tasks.vocabulary import VocabularyRecord

SIZES = (3000, 700, 5, 0, 1800)
COUNT = len(SIZES)


@dataclasses.dataclass
class Cache:
    """A cache and its content: the ids of each shard, concatenated."""

    folder: str
    manifest: CacheManifest
    streams: list[np.ndarray]

    def windows(self, length, **more):
        return Windows(self.folder, self.manifest, "train", length, **more)

    def path(self, kind, shard):
        return os.path.join(self.folder, shard_file("train", kind, shard, COUNT))


def make(folder, packing="concat", row_tokens=100, largest=70_000):
    folder.mkdir()
    vocabulary = VocabularyRecord("", largest, 0, 0)
    plan = Plan("t", {}, vocabulary, packing, row_tokens, "none", {"train": COUNT})
    generator = np.random.default_rng(0)
    finished, streams = [], []
    for number, size in enumerate(SIZES):
        with write.ShardWriter(str(folder), plan, "train", number) as writer:
            # Ids of one to four bytes.
            tokens = np.exp(generator.random(size) * np.log(largest)).astype(np.int32)
            lengths = np.diff(np.unique([0, *generator.integers(0, size + 1, size // 60), size]))
            ids = pa.array(
                [f"{number}-{document}" for document in range(len(lengths))], pa.string()
            )
            if size:
                writer.add(Documents(ids, tokens, lengths), 0)
        receipt = read_receipt(str(folder / shard_file("train", "receipt", number, COUNT)))
        finished.append(receipt.shard)
        streams.append(tokens)
    return Cache(str(folder), CacheManifest(plan, {"train": tuple(finished)}, {}), streams)


def expected(cache, length, keep_tails, across_shards=True):
    windows = []
    for stream in [np.concatenate(cache.streams)] if across_shards else cache.streams:
        cut = [stream[begin : begin + length] for begin in range(0, len(stream), length)]
        windows += cut if keep_tails else [window for window in cut if len(window) == length]
    return windows


def check(found, wanted, length):
    tokens, lengths = found
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(wanted), length)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [len(window) for window in wanted]
    for row, window in zip(tokens, wanted, strict=True):
        assert row.tolist() == [*window.tolist(), *[0] * (length - len(window))]


def read_from_threads(cache, windows, threads=8, rounds=30):
    wanted = expected(cache, windows.window_tokens, False)

    def work(seed):
        generator = np.random.default_rng(seed)
        for _ in range(rounds):
            indices = generator.integers(0, len(wanted), 6)
            check(windows.read(indices), [wanted[i] for i in indices], windows.window_tokens)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
