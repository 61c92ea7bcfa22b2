"""Stock seqio's own cache of the same Task holds the same rows and documents."""

import collections
import json
import os
import pathlib

import pytest

from pipeline.build import main
from tasks.cache import records
from tests.support.processes import started

pytestmark = [pytest.mark.tensorflow, pytest.mark.processes]

ROOT = pathlib.Path(__file__).parents[4]
MANY, ONE = "rlm_span_corruption", "python_docs_span_corruption"
MODULE = """
import sys
from trainer.annexes.seqio_tasks import catalogue
for name, corpus in {corpora!r}.items():
    catalogue.register({vocabulary!r}, corpus=corpus, names=[name], extra_ids=100)
"""


def lines(documents) -> str:
    odd = [
        {"id": "long", "text": "abc" * (1_000_000 // 3)},
        {"id": "surrogate", "text": "a \ud800 b"},  # written as \ud800, half a character
        {"id": "null", "text": None},
        {"id": "number", "text": 5},
        {"id": "blank", "text": " \n\t "},
        {"id": "combining", "text": "e\u0301\u0300\u0300 a\u0308"},
        {"id": "sentinel", "text": "noise <extra_id_0> here"},
    ]
    usual = [{"id": name, "text": text} for name, text in documents.items()]
    return "\n".join(map(json.dumps, usual[:200] + odd + usual[200:400]))


@pytest.fixture(scope="module")
def corpora(documents, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "many.jsonl").write_text(lines(documents))
    # The other files have no validation documents, which gives empty shards.
    (folder / "one.jsonl").write_text('{"id": "only", "text": "the one document"}\n')
    return {
        MANY: f"json:{folder}/many.jsonl?validation=0.02",
        ONE: f"json:{folder}/one.jsonl?validation=0.01",
    }


@pytest.fixture(scope="module")
def seqio_cache(corpora, vocabulary, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("seqio")
    (folder / "register_them.py").write_text(
        MODULE.format(corpora=corpora, vocabulary=str(vocabulary))
    )
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = started(
        "-m",
        "seqio.scripts.cache_tasks_main",
        f"--tasks={MANY},{ONE}",
        f"--output_cache_dir={folder}/cache",
        "--module_import=register_them",
        "--pipeline_options=--runner=FnApiRunner",
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "cache"


def rows(folder: pathlib.Path, split: str) -> collections.Counter:
    """Returns counts of (targets, document_starts), read record by record."""
    counts: collections.Counter = collections.Counter()
    for path in folder.glob(f"{split}.tfrecord-*"):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            end = at + int.from_bytes(data[at : at + 8], "little") + records.FRAMING_BYTES
            row = records.decode_row(records.unframe(data[at:end]))
            counts[row.targets.tobytes(), row.document_starts.tobytes()] += 1
            at = end
    return counts


@pytest.mark.parametrize("task", [MANY, ONE])
def test_the_same_rows(task, corpora, seqio_cache, vocabulary, tmp_path):
    main(
        [f"--task={task}", f"--vocabulary={vocabulary}", "--extra_ids=100",
         f"--corpus={corpora[task]}", f"--cache_dir={tmp_path}", "--max_quarantined=0.5"]
    )  # fmt: skip
    found = {split: rows(tmp_path / task, split) for split in ("train", "validation")}
    for split, ours in found.items():
        assert ours == rows(seqio_cache / task, split)
    assert sum(found["train"].values()) >= (1 if task == ONE else 700)
    assert bool(found["validation"]) == (task == MANY)
    stats = json.loads((tmp_path / task / "stats.train.json").read_text())
    theirs = json.loads((seqio_cache / task / "stats.train.json").read_text())
    for name in ("examples", "targets_tokens", "targets_max_tokens"):
        assert stats[name] == theirs[name]
