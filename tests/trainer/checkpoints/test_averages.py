"""The mean of a run's checkpoints, in the commands that read them."""

import json
import shutil

import jax
import numpy as np
import pytest

from tasks.storage import seal
from tasks.terminal.command_line import UserError
from tests.support.runs import curve, flags_of, state, trained
from tests.support.trees import assert_equal
from tests.trainer.conftest import assert_one_line, ended
from trainer import evaluate, export
from trainer.checkpoints import averages
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config.decoding import Decoding, TrainedFlags
from trainer.engine.program import Program
from trainer.huggingface import load
from trainer.inference import prompts, trained_run
from trainer.model.layers import unstack_layers

pytestmark = pytest.mark.processes

STEPS = 4
RATE = ("--optimizer.name=adamw", "--optimizer.learning_rate=1e-2", "--optimizer.warmup_steps=1")
FLAGS = (
    *("--checkpoint.every_steps=1", "--checkpoint.keep=3", "--evaluation.every_steps=2"),
    *("--metrics.every_steps=1", "--metrics.tensorboard=false", "--model.scan_layers=true", *RATE),
)
LAST = f"--train_steps={STEPS}"


@pytest.fixture(scope="module")
def kept(text_cache, tmp_path_factory):
    """The folder of a run with several checkpoints."""
    return trained(text_cache, tmp_path_factory.mktemp("kept") / "model", *FLAGS, LAST)


def opened(folder):
    run = trained_run.open_run(str(folder))
    return run, Program(run), Checkpoints(str(folder), writable=False)


def parameters(folder, average, step=STEPS):
    _, program, checkpoints = opened(folder)
    found = averages.parameters(checkpoints, step, program, average)
    checkpoints.close()
    return jax.tree.map(np.asarray, found)


def test_results_of_an_average_are_kept_apart(kept):
    lines = {(line["split"], line["step"]): line["metrics"] for line in curve(kept)}
    own = lines["validation", STEPS]
    for flags in ((), ("--average=last:3",)):
        evaluate.main([f"--model_dir={kept}", *flags])
    found = json.loads((kept / "evaluation.json").read_text())["checkpoints"]["4"]
    assert [*found] == ["validation", "validation.last3"]
    assert found["validation"] == own
    assert found["validation.last3"]["loss"] != own["loss"]


def test_the_mean_of_the_last_checkpoints_is_numpys(kept, capsys):
    states = [state(kept, step)["params"] for step in (2, 3, 4)]
    for count, some in ((3, states), (2, states[1:])):
        expected = jax.tree.map(
            lambda *leaves: np.mean(np.stack(leaves), 0, np.float64).astype(np.float32), *some
        )
        assert_equal(parameters(kept, f"last:{count}"), expected)
    assert "averaging checkpoints 3, 4" in capsys.readouterr().err
    assert_equal(parameters(kept, "last:2", step=3), jax.tree.map(
        lambda *leaves: np.mean(np.stack(leaves), 0, np.float64).astype(np.float32), *states[:2]
    ))  # fmt: skip


@pytest.mark.torch
def test_an_export_has_the_average(kept, tmp_path):
    average, output = "last:3", str(tmp_path / "exported")
    flags = [f"--model_dir={kept}", f"--average={average}"]
    assert export.main([*flags, f"--output={output}"]) == 0  # transformers computes its logits
    model = opened(kept)[0].config.model
    assert_equal(load(output, model), unstack_layers(parameters(kept, average)))
    assert json.loads((tmp_path / "exported/conversion.json").read_text())["average"] == average
    assert average in (tmp_path / "exported/README.md").read_text()


def test_texts_are_generated_by_the_average(kept):
    flags = TrainedFlags(model_dir=str(kept), step=3, average="last:2")
    generator = prompts.generator_of(flags, Decoding())
    assert generator.step == 3
    assert_equal(generator._params, parameters(kept, "last:2", step=3))


def test_all_steps_that_have_enough_checkpoints_are_averaged(kept, capsys):
    checkpoints = Checkpoints(str(kept), writable=False)
    assert averages.steps_of("all", checkpoints, str(kept), "last:2") == [3, 4]
    assert "too few checkpoints up to step 2" in capsys.readouterr().err
    assert averages.steps_of("all", checkpoints, str(kept), None) == [2, 3, 4]
    assert averages.steps_of("latest", checkpoints, str(kept), "last:3") == [4]
    for text, average in (("4,2", "last:2"), ("all", "last:4")):
        with pytest.raises(UserError, match="up to step 2 there are only 1 checkpoints"):
            averages.steps_of(text, checkpoints, str(kept), average)
    checkpoints.close()


def test_mistakes_are_one_line(kept, text_cache, tmp_path, capsys):
    more = ("trainer.evaluate", [f"--model_dir={kept}", "--average=last:4"])
    assert_one_line(*ended(*more, capsys), "--average=last:4: up to step 4 there are only 3 check")
    for command, flags in {
        "evaluate": (f"--model_dir={kept}",),
        "export": (f"--model_dir={kept}", f"--output={tmp_path}/x"),
        "generate": (f"--model_dir={kept}", "--prompt=a"),
    }.items():
        for average in ("last:1", "ema", "last:0", "last:"):
            code, said = ended(f"trainer.{command}", [*flags, f"--average={average}"], capsys)
            assert_one_line(code, said, f"--average={average}: it must be last:K, with K of")


def test_an_earlier_run_that_kept_a_moving_average_is_read_and_not_resumed(
    kept, text_cache, tmp_path, capsys
):
    run = shutil.copytree(kept, tmp_path / "model")

    def store(decay):
        for path in (run / "config.json", *run.glob("checkpoint_*/run/metadata")):
            value, _ = seal.opened(json.loads(path.read_text()))
            value["config"]["averages"] = {"ema_decay": decay, "ema_start_step": 0}
            path.write_text(json.dumps(seal.sealed(value)))

    store(None)
    evaluate.main([f"--model_dir={run}"])
    store(0.9)
    capsys.readouterr()
    evaluate.main([f"--model_dir={run}"])
    said = capsys.readouterr().err
    assert said.count("the run kept a moving average (averages.ema_decay=0.9), which is gone") == 1
    for source, flags in (
        (run, flags_of(text_cache, run, *FLAGS, LAST, "--preset=t5_1_1_tiny")),
        (run, flags_of(text_cache, tmp_path / "branch", LAST, f"--branch_from={run}@4")),
        (run / "checkpoint_4", flags_of(text_cache, tmp_path / "new", LAST, f"--init_from={run}")),
    ):
        says = f"--init_from={source} --init_from_state=false, and use --average=last:K"
        assert_one_line(*ended("trainer.pretrain", flags, capsys), says)
