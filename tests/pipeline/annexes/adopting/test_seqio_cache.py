"""Caches that seqio_cache_tasks itself wrote are adopted, and stock seqio still reads them."""

import collections
import json
import os
import pathlib

import numpy as np
import pytest

from pipeline import verify
from pipeline.annexes.adopting import adopt
from tasks.cache.cache import Cache
from tasks.cache.lineage import Lineage
from tasks.cache.pair_windows import row_windows
from tasks.cache.windows import Windows
from tasks.vocabulary import PAIR_BORDER, load
from tests.support.processes import started

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parents[3]
MODULE = """
import functools, json, seqio, tensorflow as tf

def read(split, shuffle_files=False, seed=None):
    rows = json.load(open({rows!r}))[:200 if split == "train" else 20]
    return tf.data.Dataset.from_tensor_slices({{
        "text": [row["text"] for row in rows], "title": [row["title"] for row in rows]}})

def register(name, keys, *after):
    vocabulary = seqio.SentencePieceVocabulary({model!r}, extra_ids=100)
    feature = seqio.Feature(vocabulary)
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(read, splits=["train", "validation"]),
        preprocessors=[
            functools.partial(seqio.preprocessors.rekey, key_map=keys),
            seqio.preprocessors.tokenize, *after, seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={{"inputs": feature, "targets": feature}},
    )

register("qa_supervised", {{"inputs": "text", "targets": "title"}}, seqio.preprocessors.append_eos)
register("web_lm", {{"inputs": None, "targets": "text"}})
"""
READ = """
import seqio, register_them, sys
seqio.add_global_cache_dirs([sys.argv[1]])
for name in ("qa_supervised", "web_lm"):
    task = seqio.get_mixture_or_task(name)
    lengths = {"inputs": 4096, "targets": 4096}
    print(sum(1 for _ in task.get_dataset(lengths, "train", use_cached=True, shuffle=False)))
"""


@pytest.mark.slow
def test_a_cache_of_seqio_itself(documents, vocabulary, tmp_path):
    rows = [{"text": text[:600], "title": name} for name, text in list(documents.items())[:200]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    model = str(vocabulary / "sentencepiece.model")
    (tmp_path / "register_them.py").write_text(
        MODULE.format(rows=str(tmp_path / "rows.json"), model=model)
    )
    caches = tmp_path / "caches"

    def python(*arguments):
        path = os.pathsep.join([str(ROOT), str(tmp_path)])
        done = started(*arguments, env={**os.environ, "PYTHONPATH": path})  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    python(
        "-m", "seqio.scripts.cache_tasks_main", "--tasks=qa_supervised,web_lm", "--min_shards=3",
        f"--output_cache_dir={caches}", "--module_import=register_them",
        "--pipeline_options=--runner=FnApiRunner",
    )  # fmt: skip
    for name in ("qa_supervised", "web_lm"):
        adopt.main(
            [f"--cache_dir={caches}/{name}", f"--vocabulary={vocabulary}", "--extra_ids=100"]
        )
        assert verify.main([f"--cache={caches}/{name}"]) == 0

    loaded = load(str(vocabulary), 100)
    wanted = {
        side: [ids.tolist() for ids in loaded.encode([row[side] for row in rows])]
        for side in ("text", "title")
    }
    cache = Cache.open(str(caches / "qa_supervised"))
    windows = row_windows(cache.folder, cache.manifest, "train")
    tokens_WN, lengths_W = windows.read(np.arange(len(windows)))
    found = collections.Counter(
        tuple(tokens_N[:n].tolist()) for tokens_N, n in zip(tokens_WN, lengths_W, strict=True)
    )
    assert found == collections.Counter(
        (*text, PAIR_BORDER, *title)
        for text, title in zip(wanted["text"], wanted["title"], strict=True)
    )

    cache = Cache.open(str(caches / "web_lm"))
    stream = Windows(cache.folder, cache.manifest, "train", 10_000_000, keep_tails=True)
    tokens_WN, _ = stream.read(np.array([0]))
    parts = Lineage(cache.folder, cache.manifest, "train").parts(stream.where(0))
    found = collections.Counter(
        tuple(tokens_WN[0, part.position : part.position + part.tokens].tolist()) for part in parts
    )
    assert found == collections.Counter(map(tuple, wanted["text"]))
    assert python("-c", READ, str(caches)).split() == ["200", "200"]
