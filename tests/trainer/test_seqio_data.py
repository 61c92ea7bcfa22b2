"""Tasks of seqio's own registry as a run's data: ours from a cache, and somebody's own."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.trainer.test_commands import assert_same_state, curve, state

ROOT = pathlib.Path(__file__).parents[2]
MODULE = """
import numpy as np
import seqio
from tasks import seqio_tasks

CORPUS = "text:{folder}/*.txt"
seqio_tasks.register("{folder}/vocabulary", corpus=CORPUS, row_tokens=100,
                     names=["python_docs_span_corruption", "python_docs_autoregressive_lm"])
VOCABULARY = seqio.SentencePieceVocabulary("{folder}/vocabulary/sentencepiece.model")


def sentences(split, shuffle_files, seed=None):
    import tensorflow as tf

    lines = open("{folder}/" + split + ".txt").read().splitlines()[:200]
    return tf.data.Dataset.from_tensor_slices({{"inputs": lines, "targets": lines[::-1]}})


seqio.TaskRegistry.add(
    "backwards",
    source=seqio.FunctionDataSource(sentences, splits=["train", "validation"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    output_features={{side: seqio.Feature(VOCABULARY) for side in ("inputs", "targets")}},
    metric_fns=[],
)
seqio.MixtureRegistry.add("both", [("backwards", 1), ("python_docs_span_corruption", 3)])
"""


@pytest.fixture(scope="module")
def folder(text_cache, tmp_path_factory):
    """A working directory with a module that registers tasks with seqio."""
    folder = tmp_path_factory.mktemp("seqio_data")
    (folder / "our_tasks.py").write_text(MODULE.format(folder=text_cache.parents[1]))
    return folder


def pretrain(folder, model_dir, task, *flags):
    return subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "trainer.pretrain",
                f"--task={task}",
                f"--model_dir={model_dir}",
            ),
            *("--preset=t5_1_1_tiny", "--task_module=our_tasks", "--batch_size=4"),
            *("--lengths.inputs=64", "--lengths.targets=64", "--metrics.every_steps=1", *flags),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )


def test_a_mixture_of_seqio_s_trains_and_resumes(folder, text_cache, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    cache = f"--cache_dir={text_cache.parent}"
    whole = pretrain(folder, straight, "seqio:both", cache, "--train_steps=4")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("seqio makes these batches") == 1
    assert "not cached" in whole.stdout  # since one of its tasks is not
    for steps in (2, 4):
        half = pretrain(folder, resumed, "seqio:both", cache, f"--train_steps={steps}")
        assert half.returncode == 0, half.stderr
    assert_same_state(state(straight, 4), state(resumed, 4))
    losses = [line["metrics"]["loss"] for line in curve(straight) if line["split"] == "train"]
    assert len(set(losses)) == 4


def test_our_cache_is_read_through_seqio(folder, text_cache, tmp_path):
    name, lm = "seqio:python_docs_autoregressive_lm", "--preset=lm_tiny"
    flags = (lm, f"--cache_dir={text_cache.parent}", "--train_steps=1")
    result = pretrain(folder, tmp_path, name, *flags)
    assert result.returncode == 0, result.stderr
    assert "tokenized anew" in result.stdout
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "python_docs_autoregressive_lm").symlink_to(text_cache)
    flags = (lm, f"--cache_dir={tmp_path}/cache", "--train_steps=1")
    result = pretrain(folder, tmp_path / "model", name, *flags)
    assert result.returncode == 0, result.stderr
    assert "its cache" in result.stdout


@pytest.mark.parametrize(
    ("task", "flags", "says"),
    [
        ("seqio:backward", (), "did you mean backwards"),
        ("seqio:backwards", ("--lengths.targets=None",), "needs --lengths.targets"),
        ("seqio:backwards", ("--mixing.maximum=3",), "--mixing.maximum has no effect"),
        ("seqio:backwards", ("--task_module=my_tasks",), "my_tasks cannot be imported"),
    ],
)
def test_what_seqio_cannot_do_is_one_clear_line(folder, tmp_path, task, flags, says):
    result = pretrain(folder, tmp_path, task, *flags)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
