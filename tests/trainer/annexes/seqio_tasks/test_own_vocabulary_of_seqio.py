"""Stock seqio reads a build with a user's own vocabulary."""

import pytest
import seqio

from tests.trainer.test_own_vocabulary import apart as apart
from tests.trainer.test_own_vocabulary import cache as cache
from tests.trainer.test_own_vocabulary import folder as folder
from tests.trainer.test_own_vocabulary import module as module
from tests.trainer.test_own_vocabulary import proteins as proteins
from trainer.annexes.seqio_tasks import catalogue

pytestmark = pytest.mark.tensorflow


def test_stock_seqio_reads_and_makes_the_same_rows(cache, folder, proteins):
    corpus, names = f"json:{folder}/proteins.jsonl", ["proteins_span_corruption"]
    settings = {"task_module": "proteins", "extra_ids": 40, "row_tokens": 64}
    (task,) = catalogue.register("protein", corpus, names, **settings)
    stock = task.output_features["targets"].vocabulary
    assert (stock.eos_id, stock.vocab_size) == (2, 65)
    assert stock.decode(stock.encode("ACDW")) == "ACDW"
    seqio.add_global_cache_dirs([f"{folder}/cache"])
    lengths = {"inputs": 64, "targets": 24}
    for cached in (True, False):
        read = task.get_dataset(lengths, "train", use_cached=cached, shuffle=False)
        first = next(read.as_numpy_iterator())
        assert first["inputs"][-1] == 2
        assert first["inputs"].max() < 65
