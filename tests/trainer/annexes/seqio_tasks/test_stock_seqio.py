"""Stock seqio reads caches of texts and of pairs, by our tasks in its registry."""

import shutil

import numpy as np
import pytest
import seqio

from tasks.cache.manifest import CacheManifest
from tasks.cache.pair_windows import open_windows
from tasks.objectives import Lengths, Supervised
from tasks.objectives.supervised import CUT
from tasks.vocabulary import EOS_ID, TokenIds
from tests.pipeline.building.test_pairs import TASK
from tests.pipeline.building.test_pairs import make as make
from tests.pipeline.building.test_pairs import rows as rows
from tests.trainer.test_adapters import LM, WINDOW, assert_equal
from tests.trainer.test_adapters import windows as windows
from trainer.annexes.seqio_tasks import catalogue

pytestmark = pytest.mark.tensorflow


def test_seqio_gives_the_windows(text_cache, windows, tmp_path):
    shutil.copytree(text_cache, tmp_path / LM)
    try:
        (task,) = catalogue.register(str(text_cache), names=[LM], row_tokens=WINDOW)
        seqio.set_global_cache_dirs([str(tmp_path)])
        # seqio reads 16 shards at a time, in turns; one after the other they have an order.
        count = len(CacheManifest.load(str(text_cache)).splits["train"])
        found = [
            element["targets"]
            for shard in range(count)
            for element in task.get_dataset(
                {"targets": WINDOW + 1},
                "train",
                shuffle=False,
                use_cached=True,
                shard_info=seqio.ShardInfo(shard, count),
            ).as_numpy_iterator()
        ]
    finally:
        seqio.TaskRegistry.remove(LM)
        seqio.set_global_cache_dirs([])
    assert all(targets[-1] == 1 for targets in found)
    assert_equal([targets[:-1] for targets in found], windows)


def test_stock_seqio_reads_the_cache_and_the_corpus_alike(make, tmp_path, vocabulary):
    corpus = f"json:{tmp_path}/corpus/*.jsonl?inputs={{q}}&targets=a&validation=0"
    cache = make(f"--corpus={corpus}")
    (task,) = catalogue.register(str(vocabulary), corpus, [TASK], extra_ids=100)
    seqio.add_global_cache_dirs([str(tmp_path / "cache")])
    lengths = {"inputs": 20, "targets": 6}

    def read(use_cached):
        dataset = task.get_dataset(lengths, "train", use_cached=use_cached, shuffle=False)
        return [
            {name: row[name].tolist() for name in lengths} for row in dataset.as_numpy_iterator()
        ]

    uncached, cached = read(False), read(True)
    assert sorted(cached, key=str) == sorted(uncached, key=str)  # seqio interleaves shards
    manifest = CacheManifest.load(str(cache))
    ours = open_windows(
        str(cache), manifest, "train", Supervised(CUT), Lengths(20, 6), across_shards=False
    )
    tokens_WN, lengths_W = ours.read(np.arange(len(ours)))
    made = Supervised().examples(tokens_WN, lengths_W, None, Lengths(20, 6), TokenIds(1000, 0))
    assert len(ours) == len(uncached)
    for index, row in enumerate(uncached):
        for name in lengths:
            values_WL, sizes_W = made[name]
            assert values_WL[index, : sizes_W[index]].tolist() == row[name]
            assert row[name][-1] == EOS_ID
