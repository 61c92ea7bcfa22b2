"""Runs as models of lm-evaluation-harness, beside its own `hf` on their exports."""

import functools
import itertools
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tasks.vocabulary import encode_with_sentinels
from tests.support import in_process, small_tokenizers
from tests.support.parameters import slow_unless
from tests.support.runs import command, finish, start
from tests.trainer.conftest import assert_one_line, ended
from tests.trainer.huggingface.test_export import save_run
from tests.trainer.test_any_vocabulary import RUNS as KINDS
from tests.trainer.test_any_vocabulary import built, run_flags
from trainer import pretrain
from trainer.config.decoding import Decoding
from trainer.engine.program import Program
from trainer.evaluating.likelihood import Likelihood
from trainer.exporting import exporting
from trainer.inference import trained_run
from trainer.inference.generator import Generator
from trainer.inference.trained_run import vocabulary_of

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra harness")
from lm_eval.tasks import TaskManager  # noqa: E402

from trainer.annexes.harness.model import Palimpsest  # noqa: E402

pytestmark = pytest.mark.torch

QUESTIONS = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
TEXTS = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
ANSWERS = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["\n", "s"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match"}],
}
METRICS = {
    "questions": ["acc,none", "acc_norm,none"],
    "texts": ["bits_per_byte,none"],
    "answers": ["exact_match,none"],
}
TASKS = {"questions": QUESTIONS, "texts": TEXTS, "answers": ANSWERS}
NAMES = ",".join(TASKS)


@pytest.fixture(scope="module")
def tasks(text_cache, tmp_path_factory):
    """Returns a folder of three tasks of ten examples each, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = (text_cache.parents[1] / "validation.txt").read_text().splitlines()
    long = [line for line in lines if len(line.split()) > 6][:11]
    with (folder / "examples.jsonl").open("w") as file:
        for number, (line, other) in enumerate(itertools.pairwise(long)):
            *words, last = line.split()
            choices = [f" {last}", f" {other.split()[1]} {other.split()[2]}"]
            order = [choices, choices[::-1]][number % 2]
            # An empty context, and one with a space that belongs to the answer.
            question = ["", "A list ", " ".join(words[:4])][min(number, 2)]
            # One text is longer than the rows of the decoder.
            text = line if number == 3 else " ".join(words[:6])
            row = {"question": question, "choices": order, "answer": number % 2, "text": text}
            file.write(json.dumps(row) + "\n")
    for name, task in TASKS.items():
        data = {"data_files": {"test": f"{folder}/examples.jsonl"}}
        shared = {"task": name, "dataset_path": "json", "dataset_kwargs": data}
        written = json.dumps(shared | {"test_split": "test"} | task)  # YAML includes JSON
        (folder / f"{name}.yaml").write_text(written)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


RUNS = {
    "decoder": ("llama_tiny", {"task": "python_docs_lm", "lengths": (None, 64)}),
    "encoder_decoder": ("t5_1_1_tiny", {"lengths": (64, 18)}),
}


@pytest.fixture(scope="module")
def made(text_cache, tmp_path_factory):
    """Returns a function that makes a run of a kind, once."""

    @functools.cache
    def make(kind, *flags):
        preset, named = RUNS[kind]
        folder = tmp_path_factory.mktemp("harness") / "run"
        layers = ["decoder"] if kind == "decoder" else ["encoder", "decoder"]
        flags += tuple(f"--model.num_{side}_layers=1" for side in layers)
        return save_run(text_cache, folder, preset, *flags, **named)

    return make


def ours(run, tasks, tmp_path, *flags):
    """Returns the results of the command, which prints their table."""
    output = tmp_path / f"{Path(run).name}.json"
    given = (f"--include_path={tasks}", f"--output={output}", "--batch_size=4", *flags)
    done = in_process.run(
        "trainer.annexes.harness.harness", f"--model_dir={run}", f"--tasks={NAMES}", *given
    )
    assert done.returncode == 0, done.stderr
    assert "|questions" in done.stdout
    return json.loads(output.read_text())


def theirs(exported, tasks, names=NAMES, **arguments):
    """Returns the results of the harness's `hf`."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    arguments = {"pretrained": exported, "dtype": "float32"} | arguments
    return lm_eval.simple_evaluate(
        *("hf", arguments, names.split(",")),
        **{"task_manager": manager, "batch_size": 4, "device": "cpu", "bootstrap_iters": 0},
    )


def answers(results, name):
    """Returns the answers to the requests of a task's examples, in order."""
    examples = sorted(results["samples"][name], key=lambda each: each["doc_id"])
    assert len(examples) == 10
    return [answer for each in examples for answer in itertools.chain(*each["resps"])]


def assert_agree(mine, hf, names=NAMES, longer=False):
    """Asserts that the answers and scores are equal; texts of hf may be `longer`."""
    for name in names.split(","):
        for found, expected in zip(answers(mine, name), answers(hf, name), strict=True):
            if isinstance(expected, str):
                assert expected.startswith(found) if longer else expected == found
                continue
            found, expected = np.ravel(found), np.ravel(expected)
            np.testing.assert_allclose(found, expected, atol=1e-3)
        for metric in METRICS[name]:
            found, expected = (each["results"][name][metric] for each in (mine, hf))
            assert found == pytest.approx(expected, rel=1e-4)


def test_a_decoder_scores_and_generates_as_its_export(made, tasks, tmp_path):
    run, exported = made("decoder"), f"{tmp_path}/exported"
    exporting.export(run, exported)
    mine = ours(run, tasks, tmp_path)
    assert_agree(mine, theirs(exported, tasks), "questions,answers")
    # Without this, the harness also scores the BOS that begins a text.
    assert_agree(mine, theirs(exported, tasks, "texts", add_bos_token=False), "texts")
    assert len(set(answers(mine, "answers"))) > 3


def test_what_a_decoder_generates_is_greedy(made):
    run = made("decoder")
    generator, model = Generator(run, Decoding(max_new_tokens=4)), Palimpsest(run, batch_size=2)
    (best,) = generator([generator.ids("A list of")])
    context, ids = model.tok_encode("A list of"), best.ids.tolist()
    answered = model._loglikelihood_tokens(
        [(None, context, ids), (None, context, [*ids[:-1], ids[-1] + 1])]
    )
    assert [greedy for _, greedy in answered] == [True, False]
    assert answered[0][0] == pytest.approx(best.score, abs=1e-4)


def _untied(exported):
    """Returns the model of an export whose logits the harness does not tie to the embedding."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(exported)
    model.tie_weights = lambda: None
    return {"pretrained": model, "tokenizer": exported}


@pytest.mark.processes
@pytest.mark.parametrize("tied", slow_unless([True], [True, False]))
def test_an_encoder_decoder_scores_and_generates_as_its_export(made, tasks, tmp_path, tied):
    run, exported = made("encoder_decoder", f"--model.tied_logits={tied}"), f"{tmp_path}/exported"
    exporting.export(run, exported)
    mine = ours(run, tasks, tmp_path, "--form=targets")
    hf = theirs(exported, tasks, backend="seq2seq", **{} if tied else _untied(exported))
    # hf lets an encoder-decoder go on for as many more tokens as its context has.
    assert_agree(mine, hf, longer=True)


def scores(run, pairs, **named):
    """Returns (log likelihood, greedy) of (context, continuation) under a run."""
    model = Palimpsest(run, batch_size=4, **named)
    return model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])


@pytest.mark.processes
def test_a_pretrained_encoder_decoder_fills_a_gap(made, tasks, tmp_path):
    run, gap = made("encoder_decoder", "--model.tied_logits=True"), "<extra_id_0>"
    pairs = [("The list", " of objects"), ("", "Returns"), (f"The {gap} of objects", "list")]
    spans = scores(run, pairs)
    with_gap = [context if gap in context else f"{context} {gap}" for context, _ in pairs]
    whole = scores(
        run,
        [(context, gap + pair[1]) for context, pair in zip(with_gap, pairs, strict=True)],
        form="targets",
    )
    begun = scores(run, [(context, gap) for context in with_gap], form="targets")
    for span, both, first in zip(spans, whole, begun, strict=True):
        assert span[0] == pytest.approx(both[0] - first[0], abs=1e-4)
    model, vocabulary = Palimpsest(run), vocabulary_of(trained_run.open_run(run), None)
    (log,) = model.loglikelihood_rolling([SimpleNamespace(args=("Returns",))])
    assert log == pytest.approx(spans[1][0], abs=1e-4)  # without EOS
    # Of a generated text, the first span answers.
    ids = encode_with_sentinels(vocabulary, f"{gap} of objects<extra_id_1> None")
    assert model._text(ids) == "of objects"


@pytest.mark.processes
def test_a_decoder_with_inputs_scores_as_in_training(text_cache, tmp_path):
    named = {"task": "python_docs_prefix_lm", "lengths": (24, 24)}
    folder = save_run(text_cache, tmp_path / "run", "lm_tiny", **named)
    pairs = [("The list", " of objects"), ("A", " b c"), ("", "Returns a list of all")]
    run = trained_run.open_run(folder)
    vocabulary, program = vocabulary_of(run, None), Program(run)
    ids = [[vocabulary.encode([side])[0] for side in pair] for pair in pairs]
    eos = np.int32(vocabulary.special.eos)
    _, params = trained_run.restore(run, None, vocabulary)
    expected = Likelihood(program, run.converter, 4)(
        params, [(np.append(inputs, eos), targets) for inputs, targets in ids]
    )
    found = [log for log, _ in scores(folder, pairs)]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    with pytest.raises(UserError, match="reads at most 48: set --max_length"):
        scores(folder, [("A", " list" * 60)])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_four_devices_score_as_one(made, tasks, tmp_path, kind):
    run, output = made(kind), tmp_path / "four.json"
    flags = (f"--include_path={tasks}", f"--output={output}", "--batch_size=4")
    words = command(
        "trainer.annexes.harness.harness", f"--model_dir={run}", f"--tasks={NAMES}", *flags
    )
    devices = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    finish([start(words, env=os.environ | {"XLA_FLAGS": devices})])
    assert_agree(ours(run, tasks, tmp_path), json.loads(output.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "gpt2", "byte"])
def test_vocabularies_without_padding_and_converted_folders(kind, tasks, tmp_path):
    documents = small_tokenizers.documents(100)
    lines = (json.dumps({"id": str(n), "text": text}) for n, text in enumerate(documents))
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    preset, objective = KINDS[kind]
    corpus = f"json:{tmp_path}/documents.jsonl"
    run, exported, back = (f"{tmp_path}/{name}" for name in ("model", "exported", "back"))
    cache, path, _ = built(tmp_path, kind, objective, documents, corpus)
    assert pretrain.main([f"--preset={preset}", *run_flags(kind, cache, tmp_path)]) == 0
    exporting.export(run, exported)
    vocabulary = (f"--vocabulary={path}", "--extra_ids=40")
    given = (f"--from={exported}", f"--to={back}", "--format=palimpsest")
    convert = pytest.importorskip("trainer.annexes.conversion.convert")
    assert convert.main([*given, *vocabulary]) == 0
    encodes = objective == "span_corruption"
    form = ["--form=targets"] if encodes else []
    length = [] if encodes else ["--max_length=40"]  # a folder does not know training's
    mine = ours(run, tasks, tmp_path, *form)
    hf = theirs(exported, tasks, **_untied(exported) if encodes else {})
    assert_agree(mine, hf, "questions,answers", longer=encodes)
    assert_agree(ours(back, tasks, tmp_path, *length, *form), mine)


@pytest.fixture
def fails(made, tasks, capsys):
    """Returns a function that asserts how the command ends: one line that says so."""

    def check(says, *flags, kind="decoder"):
        given = [f"--model_dir={made(kind)}", f"--include_path={tasks}", "--tasks=texts"]
        assert_one_line(*ended("trainer.annexes.harness.harness", [*given, *flags], capsys), says)

    return check


def test_mistakes_are_named(fails, tasks, tmp_path, text_cache, monkeypatch):
    fails("--form=span is for models that read inputs, but this one continues", "--form=span")
    fails("max_gen_toks=N or --max_length", "--tasks=answers", "--gen_kwargs=max_gen_toks=64")
    fails("generation_kwargs: typical_p: only until", "--tasks=answers", "--gen_kwargs=typical_p=1")
    sampled = "--gen_kwargs=do_sample=true,temperature=0"
    fails("generation_kwargs: Decoding.temperature is 0", "--tasks=answers", sampled)
    fails(f"{tmp_path} holds no run", f"--model_dir={tmp_path}")
    fails("--include_path=nowhere: no such folder", "--include_path=nowhere")
    (tmp_path / "lost.yaml").write_text((tasks / "texts.yaml").read_text().replace("jsonl", "gone"))
    fails("--tasks=texts: ", f"--include_path={tmp_path}")
    text = (tasks / "texts.yaml").read_text()
    for name, written in (("empty", ""), ("broken", "{"), ("other", '{"column": "x"}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(written)
        data = re.sub(r"[^ \"']+\.jsonl", f"{tmp_path}/{name}/a.jsonl", text)
        (tmp_path / name / "mine.yaml").write_text(data)
        fails("--tasks=texts: ", f"--include_path={tmp_path}/{name}")
    fails(
        "generation_kwargs: invalid literal for int() with base 10: 'abc'",
        "--tasks=answers",
        "--gen_kwargs=max_gen_toks=abc",
    )
    fails("exists: name another file", f"--output={tasks}/texts.yaml")
    masked = {"task": "python_docs_masked_lm", "lengths": (64, 64)}
    encoder = save_run(text_cache, tmp_path / "bert", "bert_tiny", **masked)
    fails("family bert has no decoder", f"--model_dir={encoder}")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fails(f"needs the package lm_eval: {extras.install('harness')}")


@pytest.mark.slow
def test_an_unknown_task_is_named(fails):
    """The harness reads its own tasks for 10 seconds."""
    fails("no task hellaswagg (did you mean hellaswag?)", "--tasks=texts,hellaswagg")
