"""Averages of a run: in its evaluations and checkpoints, and in the commands that read these."""

import json

import jax
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import curve, flags_of, metadata, state, trained
from tests.support.trees import assert_equal
from tests.trainer.conftest import assert_one_line, ended
from trainer import evaluate, export
from trainer.checkpoints import averages
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config.decoding import Decoding, TrainedFlags
from trainer.config.from_flags import build_config
from trainer.engine.program import Program
from trainer.huggingface import load
from trainer.model.layers import unstack_layers
from trainer.setup import prepare
from trainer.starting import init_from
from trainer.trained import prompts, trained_run

pytestmark = pytest.mark.processes

STEPS = 4
RATE = ("--optimizer.name=adamw", "--optimizer.learning_rate=1e-2", "--optimizer.warmup_steps=1")
FLAGS = (
    *("--checkpoint.every_steps=1", "--checkpoint.keep=3", "--evaluation.every_steps=2"),
    *("--metrics.every_steps=1", "--metrics.tensorboard=false", "--model.scan_layers=true", *RATE),
)
EMA = ("--averages.ema_decay=0.8", "--checkpoint.best_metric=ema/loss")
LAST = f"--train_steps={STEPS}"


@pytest.fixture(scope="module")
def kept(text_cache, tmp_path_factory):
    """The folder of a run that keeps an average."""
    return trained(text_cache, tmp_path_factory.mktemp("kept") / "model", *FLAGS, *EMA, LAST)


def opened(folder):
    run = trained_run.open_run(str(folder))
    return run, Program(run), Checkpoints(str(folder), writable=False)


def parameters(folder, average, step=STEPS):
    _, program, checkpoints = opened(folder)
    found = averages.parameters(checkpoints, step, program, average)
    checkpoints.close()
    return jax.tree.map(np.asarray, found)


def test_a_resumed_run_has_the_average_of_one_that_went_on(kept, text_cache, tmp_path):
    trained(text_cache, tmp_path / "model", *FLAGS, *EMA, "--train_steps=2")
    trained(text_cache, tmp_path / "model", *FLAGS, *EMA, LAST)
    assert_equal(state(tmp_path / "model", STEPS), state(kept, STEPS))
    assert [line for line in curve(tmp_path / "model") if line["step"] > 2] == [
        line for line in curve(kept) if line["step"] > 2
    ]


def test_evaluations_report_both(kept):
    by_split = {
        split: {line["step"]: line["metrics"] for line in curve(kept) if line["split"] == split}
        for split in ("validation", "validation.ema")
    }
    assert all([*lines] == [2, 4] for lines in by_split.values())
    own, averaged = (lines[4] for lines in by_split.values())
    assert own.keys() == averaged.keys()
    assert own["loss"] != averaged["loss"]
    assert metadata(kept, STEPS)["best"] == {
        "metric": "ema/loss",
        "value": min(line["loss"] for line in by_split["validation.ema"].values()),
        "step": 4,
    }
    # trainer.evaluate computes the same from the checkpoint, and keeps them apart.
    for flags in ((), ("--average=ema",), ("--average=last:3",)):
        evaluate.main([f"--model_dir={kept}", *flags])
    found = json.loads((kept / "evaluation.json").read_text())["checkpoints"]["4"]
    assert [*found] == ["validation", "validation.ema", "validation.last3"]
    assert (found["validation"], found["validation.ema"]) == (own, averaged)
    assert found["validation.last3"]["loss"] not in (own["loss"], averaged["loss"])


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
    stored = state(kept, STEPS)["opt_state"]
    assert_equal(parameters(kept, "ema"), stored[-1]["average"])


@pytest.mark.torch
@pytest.mark.parametrize("average", ["ema", "last:3"])
def test_an_export_has_the_average(kept, tmp_path, average):
    output = str(tmp_path / "exported")
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
        "fill": (f"--model_dir={kept}", "a <extra_id_0>"),
        "generate": (f"--model_dir={kept}", "--prompt=a"),
    }.items():
        for average in ("last:1", "mean", "last:0", "last:"):
            code, said = ended(f"trainer.{command}", [*flags, f"--average={average}"], capsys)
            assert_one_line(code, said, f"--average={average}: it must be ema or last:K, with K of")
    changed = flags_of(text_cache, kept, *FLAGS, "--train_steps=5", "--preset=t5_1_1_tiny")
    code, said = ended("trainer.pretrain", changed, capsys)
    assert_one_line(code, said, "averages.ema_decay was 0.8, is None")


def test_a_run_starts_from_one_with_and_without_an_average(kept, text_cache, tmp_path, capsys):
    plain = trained(text_cache, tmp_path / "plain", *FLAGS, LAST)
    code, said = ended("trainer.evaluate", [f"--model_dir={plain}", "--average=ema"], capsys)
    assert_one_line(code, said, "--average=ema: the run keeps no average")

    def begun(source, *flags):
        given = flags_of(text_cache, tmp_path / "new", *FLAGS, *flags, "--train_steps=9")
        run = prepare(*build_config("t5_1_1_tiny", [*given, f"--init_from={source}"]))
        start = init_from.start(run)
        return start.describe(), start.state(Program(run))

    says = "the average of the parameters starts from them"
    said, new = begun(plain, *EMA)
    assert "with the optimizer state" in said
    assert says in said
    assert_equal(new.opt_state[-1].average, new.params)
    assert int(new.opt_state[-1].clock.count) == STEPS
    stored = state(plain, STEPS)["opt_state"]
    assert_equal([*map(jax.tree.leaves, new.opt_state[:-1])], [*map(jax.tree.leaves, stored)])

    said, new = begun(kept, *EMA)
    assert says not in said
    assert_equal(new.opt_state[-1].average, state(kept, STEPS)["opt_state"][-1]["average"])
    assert int(new.opt_state[-1].clock.count) == STEPS

    said, new = begun(kept)
    assert "with the optimizer state" in said
    assert len(new.opt_state) == len(stored)

    said, new = begun(plain, *EMA, "--init_from_state=false")
    assert says in said
    assert int(new.opt_state[-1].clock.count) == 0
