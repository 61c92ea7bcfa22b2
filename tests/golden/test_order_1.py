"""Runs begun before version 2 of the order of data keep their batches, bit for bit."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.building import write
from tasks.cache.manifest import CacheManifest, Plan, shard_file, shard_from_dict
from tasks.cache.pack import Documents
from tasks.cache.windows import Windows
from tasks.objectives import Lengths, span_corruption
from tasks.storage import files
from tasks.vocabulary import TokenIds, VocabularyRecord
from trainer.data.batches import BatchMaker, Source, TrainingBatches, evaluation_batches
from trainer.data.features import FeatureConverter
from trainer.data.order import BlockOrder, CacheOrder, GlobalOrder

RECORDED = json.loads((Path(__file__).parent / "order_1.json").read_text())
LENGTHS, SEED = Lengths(64, 18), 11


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    """Returns a function that makes batches of a cache whose tokens count up from 3."""
    folder, sizes = tmp_path_factory.mktemp("cache"), RECORDED["sizes"]
    vocabulary = VocabularyRecord("", 6000, 100, 100)
    rows = RECORDED["row_tokens"]
    plan = Plan("t", {}, vocabulary, "concat", rows, "none", {"train": len(sizes)})
    shards, begin = [], 3
    for number, size in enumerate(sizes):
        with write.ShardWriter(str(folder), plan, "train", number) as writer:
            if size:
                tokens = np.arange(begin, begin + size, dtype=np.int32)
                writer.add(Documents(pa.array(["d"]), tokens, np.array([size])), 0)
        begin += size
        receipt = folder / shard_file("train", "receipt", number, len(sizes))
        shards.append(shard_from_dict(files.read_json(str(receipt))))
    manifest = CacheManifest(plan, {"train": tuple(shards)}, {})

    def make(keep_tails=False):
        objective = span_corruption()
        length = objective.window_tokens(LENGTHS)
        windows = Windows(str(folder), manifest, "train", length, keep_tails, across_shards=False)
        converter = FeatureConverter(LENGTHS, encoder_decoder=True)
        return BatchMaker(windows, objective, converter, TokenIds(6100, 100))

    return make


def digest(batch):
    found = hashlib.sha256()
    for name in sorted(batch):
        found.update(name.encode() + batch[name].astype(np.int64).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("shuffle", ["global", "block", "none"])
def test_training_batches_are_those_recorded(maker, shuffle):
    made = maker()
    count = len(made.windows)
    assert count == RECORDED["windows"]
    assert made.windows.window_tokens == RECORDED["window_tokens"]
    largest = max(shard.bytes for shard in made.windows._rows.files)
    order = {
        "global": GlobalOrder(count, SEED, 1),
        "block": BlockOrder(made.windows.blocks(largest), SEED, 1),
        "none": CacheOrder(),
    }[shuffle]
    batches = TrainingBatches([Source("a_task", made, order, SEED)], 8)
    for line in RECORDED["steps"][shuffle]:
        assert batches.places(line["step"]).windows.tolist() == line["windows"]
        assert digest(batches[line["step"]]) == line["sha256"]


def test_evaluation_batches_are_those_recorded(maker):
    made = maker(keep_tails=True)
    assert len(made.windows) == RECORDED["evaluation"]["windows"]
    batches = evaluation_batches(made, 16, SEED)
    assert [digest(batch) for batch in batches] == RECORDED["evaluation"]["sha256"]


def test_permutations_are_those_recorded():
    for text, numbers in RECORDED["permutations"].items():
        count = int(text)
        ranks = np.array([0, 1, 2, count // 2, count - 2, count - 1])
        assert GlobalOrder(count, SEED, 1)(np.full(6, 2), ranks).tolist() == numbers
