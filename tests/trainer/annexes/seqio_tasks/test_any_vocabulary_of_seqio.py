"""Stock seqio reads builds with every kind of vocabulary."""

import numpy as np
import pytest
import seqio

from tests.trainer.test_any_vocabulary import RUNS, assert_rows, built
from tests.trainer.test_any_vocabulary import corpus as corpus
from tests.trainer.test_any_vocabulary import documents as documents
from trainer.annexes.seqio_tasks import catalogue

pytestmark = pytest.mark.tensorflow


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in RUNS if RUNS[kind][1] == "full_lm"])
def test_stock_seqio_reads_a_build(kind, documents, corpus, tmp_path):
    cache, path, loaded = built(tmp_path, kind, "full_lm", documents, corpus)
    _, kept, wanted = assert_rows(cache, loaded, documents, kind)
    (task,) = catalogue.register(path, corpus, [f"{kind}_full_lm"], extra_ids=40, row_tokens=50)
    stock = task.output_features["targets"].vocabulary
    seqio.add_global_cache_dirs([f"{tmp_path}/cache"])
    read = task.get_dataset({"targets": 50}, "train", use_cached=True, shuffle=False)
    rows = [each["targets"] for each in read.as_numpy_iterator()]
    assert np.concatenate(rows).tolist() == wanted
    assert stock.eos_id == loaded.special.eos
    assert stock.decode(kept[0]) == loaded.decode(np.array(kept[0]))
    assert stock.encode(documents[0]) == kept[0]
