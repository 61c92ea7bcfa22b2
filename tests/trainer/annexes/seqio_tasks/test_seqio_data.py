"""Tasks in seqio's registry as a run's data: ours from a cache, and a user's own."""

import itertools
import os
import sys
import types

import pytest
import sentencepiece

from tasks.terminal.command_line import UserError
from tests.support.processes import completed
from tests.support.runs import ROOT, pretrain
from tests.support.trees import assert_equal, same
from tests.support.words import changed
from trainer.annexes.seqio_tasks.seqio_data import SeqioData
from trainer.config.from_flags import build_config
from trainer.reporting.metrics import read_metrics
from trainer.setup import prepare

pytestmark = [pytest.mark.tensorflow, pytest.mark.processes]

MODULE = """
import numpy as np
import seqio
from trainer.annexes.seqio_tasks import catalogue

CORPUS = "text:{folder}/*.txt?split=train"
catalogue.register("{folder}/vocabulary", corpus=CORPUS, row_tokens=100,
                     names=["python_docs_span_corruption", "python_docs_autoregressive_lm"])
VOCABULARY = seqio.SentencePieceVocabulary("{folder}/vocabulary/sentencepiece.model")


def sentences(split, shuffle_files, seed=None):
    import tensorflow as tf

    lines = open("{folder}/" + split + ".txt").read().splitlines()[:200]
    return tf.data.Dataset.from_tensor_slices({{"inputs": lines, "targets": lines[::-1]}})


SPLITS = ["train", "validation"]


def exact_match(targets, predictions):
    return {{"exact_match": np.mean(np.array(targets) == np.array(predictions))}}


BARE = seqio.SentencePieceVocabulary("{folder}/bare.model")
for name, cached, vocabulary, metrics in (
    ("backwards", True, VOCABULARY, []), ("streamed", False, BARE, [exact_match])
):
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(sentences, SPLITS, caching_permitted=cached),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={{side: seqio.Feature(vocabulary) for side in ("inputs", "targets")}},
        metric_fns=metrics,
    )
seqio.MixtureRegistry.add("both", [("backwards", 1), ("python_docs_span_corruption", 3)])
"""


@pytest.fixture(scope="module")
def folder(text_cache, tmp_path_factory):
    """A working directory with a module that registers tasks with seqio."""
    folder = tmp_path_factory.mktemp("seqio_data")
    sources = text_cache.parents[1]
    trained = ["--input=" + str(sources / "train.txt"), "--vocab_size=300", "--pad_id=0"]
    trained += ["--eos_id=1", "--unk_id=2", "--bos_id=-1", "--minloglevel=2"]
    sentencepiece.SentencePieceTrainer.train(" ".join([*trained, f"--model_prefix={sources}/bare"]))
    (folder / "our_tasks.py").write_text(MODULE.format(folder=text_cache.parents[1]))
    return folder


@pytest.mark.slow
def test_a_seqio_mixture_trains(folder, text_cache, tmp_path):
    flags = ("--task_module=our_tasks", "--train_steps=2", "--evaluation.every_steps=2")
    shape = {"task": "seqio:both", "lengths": (64, 64)}
    arguments = pretrain(text_cache.parent, tmp_path, *flags, **shape)
    result = completed(arguments, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("seqio makes these batches") == 1
    assert "not cached" in result.stdout  # since one of its tasks is not
    lines = read_metrics(str(tmp_path))
    assert [line["split"] for line in lines] == ["train", "train", "validation"]
    assert lines[0]["metrics"]["loss"] != lines[1]["metrics"]["loss"]


@pytest.fixture
def data(folder, monkeypatch):
    """Returns a function: task and flags -> SeqioData; seqio's registries are empty around it."""
    import seqio

    def forget():
        seqio.TaskRegistry.reset()
        seqio.MixtureRegistry.reset()
        seqio.set_global_cache_dirs([])
        sys.modules.pop("our_tasks", None)

    monkeypatch.chdir(folder)
    forget()

    def of(task, *flags, preset="lm_tiny"):
        arguments = [f"--task=seqio:{task}", "--task_module=our_tasks", "--batch_size=4"]
        arguments += ["--model_dir=nowhere", "--lengths.targets=64", *flags]
        return prepare(*build_config(preset, changed(*arguments))).data

    yield of
    forget()


def test_a_restart_resumes_where_it_was(data):
    backwards = data("backwards", "--lengths.inputs=64")
    straight = list(itertools.islice(backwards.training(0), 4))
    resumed = list(itertools.islice(backwards.training(2), 2))
    assert_equal(resumed, straight[2:])
    assert not same(straight[0], straight[1])


def test_a_skip_leaves_batches_out(data):
    flags = ("--lengths.inputs=64", "--data.shuffle=none")
    straight = list(itertools.islice(data("backwards", *flags).training(0), 6))
    skipping = data("backwards", *flags, "--data.skip=2:4,5:6")
    wanted = [straight[batch - 1] for batch in (1, 4, 6)]
    assert_equal(list(itertools.islice(skipping.training(0), 3)), wanted)
    for begun in (1, 2):
        assert_equal(next(skipping.training(begun)), wanted[begun])
    assert "leaves out batch 5: update 3 reads batch 6" in dict(skipping.consequences())["skip"]


def test_our_cache_is_read_through_seqio(data, text_cache, tmp_path):
    name = "python_docs_autoregressive_lm"
    plain = data(name, f"--cache_dir={text_cache.parent}")
    assert "tokenized by this process" in dict(plain.consequences())["task"]
    (tmp_path / name).symlink_to(text_cache)
    cached = data(name, f"--cache_dir={tmp_path}")
    assert "its cache" in dict(cached.consequences())["task"]
    refused = data(name, f"--cache_dir={tmp_path}", "--data.use_cached=false")
    assert "tokenized by this process" in dict(refused.consequences())["task"]
    batch = next(cached.training(0))
    assert batch["decoder_target_tokens"].shape == (4, 64)
    assert (batch["decoder_loss_weights"] == 1).mean() > 0.9


def warnings(data):
    return [text for subject, text in data.consequences() if subject == "warning"]


def test_risks_of_a_task_are_warned_of(data):
    flags = ("--lengths.inputs=64", "--data.use_cached=true")
    streamed = data("streamed", *flags, preset="t5_1_1_tiny")
    asked = warnings(streamed)
    assert any("streamed cannot be cached" in text for text in asked)
    assert any("the vocabulary has no sentinels" in text for text in asked)
    (examples,) = streamed.examples("validation")
    assert [metric.name for metric in examples.predicted] == ["exact_match"]
    # One that could be, with sentinels: only that there is no cache.
    (_, missing) = warnings(data("python_docs_span_corruption", *flags, preset="t5_1_1_tiny"))
    assert "cache_dir has none" in missing


def test_rows_can_be_unpacked_and_unshuffled(data):
    flags = ("--lengths.inputs=64", "--data.shuffle=none", "--data.pack=false")
    first = next(data("backwards", *flags, preset="t5_1_1_tiny").training(0))
    # One example a row: no second segment; the first rows are the first sentences.
    assert "decoder_segment_ids" not in first
    again = next(data("backwards", *flags, "--seed=7", preset="t5_1_1_tiny").training(0))
    assert_equal(again, first)


@pytest.mark.parametrize(
    ("task", "flags", "says"),
    [
        ("backward", (), "did you mean backwards"),
        ("backwards", (), "needs --lengths.inputs"),
        ("backwards", ("--data.shuffle=block",), "--data.shuffle=block has no effect"),
        ("backwards", ("--lengths.inputs=64", "--vocabulary.extra_ids=5"), "has 0 besides"),
        ("backwards", ("--task_module=my_tasks",), "my_tasks cannot be imported"),
    ],
)
def test_unsupported_settings_are_one_clear_line(data, task, flags, says):
    with pytest.raises(UserError, match=says):
        data(task, *flags)


def test_a_task_without_validation_names_the_way_on():
    data = object.__new__(SeqioData)
    data.name = "mine"
    data._mixture = types.SimpleNamespace(splits=["train"])
    with pytest.raises(UserError, match=r"no split validation: --evaluation.every_steps=0 trains"):
        data.evaluation("validation", 2)
    with pytest.raises(UserError, match=r"seqio:mine has no split test$"):
        data.evaluation("test", 2)
