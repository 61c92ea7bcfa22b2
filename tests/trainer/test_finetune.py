"""Fine-tuning by the command: settings, metrics in the loop, processes."""

import json
import os
import random
from pathlib import Path

import pytest

from tests.support.processes import completed
from tests.support.runs import command, curve, done, finish, flags_of, metadata, start_all
from tests.support.words import changed
from tests.trainer.conftest import assert_one_line, built, ended
from tests.trainer.huggingface.test_export import save_run
from trainer.reporting.metrics import read_metrics

STEPS = 6


@pytest.fixture(scope="module")
def pairs(text_cache, tmp_path_factory):
    """The folder of a cache of pairs: words, and the same backwards."""
    folder = tmp_path_factory.mktemp("finetune")
    words = sorted(set((text_cache.parents[1] / "train.txt").read_text().split()))
    generator = random.Random(0)
    for split, count in (("train", 300), ("validation", 20)):
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                text = " ".join(generator.choices(words, k=3))[:30]
                answer = " ".join(reversed(text.split()))
                file.write(json.dumps({"q": text, "a": answer}) + "\n")
    built(
        "--task=backwards_supervised",
        f"--corpus=json:{folder}/*.jsonl?split=train&inputs=q&targets=a",
        f"--vocabulary={text_cache.parents[1]}/vocabulary", f"--cache_dir={folder}/caches",
    )  # fmt: skip
    return folder / "caches"


@pytest.fixture(scope="module")
def pretrained(text_cache, tmp_path_factory):
    """The folder of a run on text."""
    model_dir = tmp_path_factory.mktemp("pretrained") / "model"
    return Path(save_run(text_cache, model_dir, "t5_1_1_tiny", "--lengths.inputs=64"))


def finetune(pretrained, pairs, model_dir, *flags):
    usual = [
        *(f"--init_from={pretrained}", f"--train_steps={STEPS}"),
        *flags_of(pairs, model_dir, task="backwards_supervised", lengths=(48, 48)),
        *("--batch_size=8", "--objective=too_long=cut", "--metrics.every_steps=1"),
        *("--metrics.tensorboard=false", "--checkpoint.every_steps=2", "--checkpoint.keep=9"),
        *("--evaluation.every_steps=3", "--evaluation.decoding.max_new_tokens=12"),
        "--evaluation.metrics=exact_match,character_error_rate",
        "--checkpoint.best_metric=character_error_rate",
    ]
    return command("trainer.finetune", *changed(*usual, *flags))


@pytest.fixture(scope="module")
def tuned(pretrained, pairs, tmp_path_factory):
    """The folder of a fine-tuned run."""
    folder = tmp_path_factory.mktemp("tuned")
    made = done(finetune(pretrained, pairs, folder / "model"))
    assert "with a new optimizer state" in made.stdout
    return folder / "model"


@pytest.mark.processes
def test_the_settings_are_those_of_t5(tuned):
    config = json.loads((tuned / "config.json").read_text())
    assert config["config"]["model"]["dropout_rate"] == 0.1
    assert config["config"]["init_from_state"] is False
    assert config["origins"]["optimizer.learning_rate"] == "fine-tuning"
    rates = {line["metrics"]["learning_rate"] for line in curve(tuned) if line["split"] == "train"}
    assert [*rates] == [pytest.approx(1e-3)]


@pytest.mark.processes
def test_metrics_and_predictions_are_written(tuned):
    lines = [line for line in read_metrics(str(tuned)) if line["split"] == "validation"]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        assert {"exact_match", "character_error_rate", "loss"} <= line["metrics"].keys()
    path = tuned / "predictions" / "validation_6.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 20
    assert found[0].keys() == {"task", "inputs", "targets", "prediction", "score"}
    assert all(line["targets"].split() == line["inputs"].split()[::-1] for line in found)
    assert metadata(tuned, 6)["best"]["metric"] == "character_error_rate"


@pytest.mark.slow
def test_two_processes_and_other_batches_give_the_same(tuned, pretrained, pairs, tmp_path):
    flags = finetune(pretrained, pairs, tmp_path / "model", "--evaluation.batch_size=4")
    finish(start_all(flags))
    found, expected = curve(tmp_path / "model"), curve(tuned)
    assert [line["split"] for line in found] == [line["split"] for line in expected]
    for one, other in zip(found, expected, strict=True):
        if one["split"] != "train":
            assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-3), one["step"]


@pytest.mark.slow
def test_any_checkpoints_are_evaluated_on_another_task(tuned, text_cache, tmp_path):
    evaluate = ["trainer.evaluate", f"--model_dir={tuned}"]
    made = done(command(*evaluate, "--steps=2,6", f"--plot={tmp_path}/curve.png"))
    assert "character_error_rate" in made.stdout
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    stored = json.loads((tuned / "evaluation.json").read_text())["checkpoints"]
    last = [line for line in curve(tuned) if line["split"] == "validation"][-1]
    assert stored["6"]["validation"] == pytest.approx(last["metrics"], rel=1e-4)

    spans = ["--task=python_docs_span_corruption", f"--cache_dir={text_cache}"]
    output = f"--output={tmp_path}/found.jsonl"
    done(command(*evaluate, *spans, output, "--metrics=exact_match,accuracy", "--examples=4"))
    (line, *_) = [json.loads(each) for each in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert (line["step"], line["split"]) == (6, "python_docs_span_corruption:validation")
    assert {"loss", "exact_match", "accuracy", "text_accuracy"} <= line["metrics"].keys()
    name = "python_docs_span_corruption_validation_6.jsonl"
    assert len((tuned / "predictions" / name).read_text().splitlines()) == 4


@pytest.mark.slow
def test_an_unknown_metric_ends_the_run_after_its_updates_are_saved(pretrained, pairs, tmp_path):
    """A user's metric names its values once it was computed."""
    (tmp_path / "own_metrics.py").write_text(
        "from tasks.metrics.metric import Metric\n"
        "METRICS = (Metric('shorter', lambda targets, predictions: {'share': 1.0}, False),)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    flags = ["--task_module=own_metrics", "--evaluation.metrics=shorter"]
    model = tmp_path / "model"
    mistaken = "--checkpoint.best_metric=shorter"
    made = completed(finetune(pretrained, pairs, model, *flags, mistaken), env=env)
    says = ("these tasks do not have this metric", "share")
    assert_one_line(made.returncode, made.stderr, *says)
    assert (model / "checkpoint_3").exists()
    right = "--checkpoint.best_metric=max:share"
    made = completed(finetune(pretrained, pairs, model, *flags, right), env=env)
    assert made.returncode == 0, made.stderr
    assert "resumes from checkpoint 3" in made.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--evaluation.metrics=exact_mach"], "did you mean exact_match"),
        (["--evaluation.metrics=token_f1", "--stopping.metric=exact_match"], "one of 'accuracy'"),
        (["--evaluation.metrics=squad,f1"], "f1 occurs twice"),
        (["--evaluation.decoding.batch_size=3"], "--evaluation.batch_size"),
        (["--trainable=nothing"], "--trainable=nothing matches no parameter"),
    ],
)
def test_a_mistake_is_one_clear_line(pretrained, pairs, tmp_path, flags, says, capsys):
    flags = finetune(pretrained, pairs, tmp_path / "model", *flags)[3:]
    assert_one_line(*ended("trainer.finetune", flags, capsys), says)
