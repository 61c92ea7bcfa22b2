"""The trainer's commands in real processes: SIGKILL, SIGTERM, resuming, wrong flags."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

import trainer.pretrain
from tasks.storage import seal
from tasks.terminal.command_line import UserError
from tests.support import runs
from tests.support.processes import completed
from tests.support.runs import TASK, command, curve, done, run, start, state
from tests.support.trees import assert_equal
from tests.trainer.conftest import assert_one_line, ended
from trainer import evaluate, export, generate
from trainer.reporting.metrics import read_metrics

pytestmark = pytest.mark.processes  # whole runs

STEPS = 60


def pretrain(cache, model_dir, *flags):
    return runs.pretrain(
        *(cache, model_dir, f"--train_steps={STEPS}", "--model.dropout_rate=0.1"),
        *("--model.num_encoder_layers=1", "--model.num_decoder_layers=1"),
        *("--metrics.every_steps=8", "--metrics.norms_every_steps=7"),
        *("--evaluation.every_steps=30", "--checkpoint.every_steps=5", "--checkpoint.keep=None"),
        *flags,
    )


@pytest.fixture(scope="module")
def finished(text_cache, tmp_path_factory):
    """The model directory of an uninterrupted run."""
    model_dir = tmp_path_factory.mktemp("finished") / "model"
    done(pretrain(text_cache, model_dir, "--profile_steps=3:4"))
    return model_dir


def test_a_run_writes_metrics_checkpoints_and_a_profile(finished):
    lines = read_metrics(str(finished))
    steps = [line["step"] for line in lines if line["split"] == "train"]
    assert steps == [*range(8, STEPS, 8), STEPS]
    norms = [line for line in lines if line["split"] == "norms"]
    assert [line["step"] for line in norms] == [*range(7, STEPS, 7), STEPS]
    assert norms[0]["metrics"]["weight_update_rms/decoder/layers_0/mlp/wo/kernel"] > 0
    assert list((finished / "tensorboard" / "norms").iterdir())
    validation = [line for line in lines if line["split"] == "validation"]
    assert [line["step"] for line in validation] == [30, 60]
    first, last = (line["metrics"]["loss"] for line in validation)
    assert last < first < 7
    assert 3 < validation[0]["metrics"]["unigram_entropy"] < 7
    names = {"config.json", "software.json", "metrics.jsonl", "tensorboard", "checkpoint_60"}
    assert {path.name for path in finished.iterdir()} >= names
    origins = json.loads((finished / "config.json").read_text())["origins"]
    assert origins["model.vocab_size"] == "vocabulary of the cache"
    assert list((finished / "tensorboard" / "train").iterdir())
    (trace,) = (finished / "profile").rglob("perfetto_trace.json.gz")
    with gzip.open(trace) as file:
        assert json.load(file)["traceEvents"]
    speeds = [line["speed"] for line in lines if line["split"] == "train"]
    assert all("tokens_per_second" in speed for speed in speeds[1:])
    assert all(speed["checkpoint_blocking_seconds"] > 0 for speed in speeds[:-1])


@pytest.mark.processes
def test_killed_and_terminated_runs_end_in_the_same_bits(text_cache, finished, tmp_path):
    generator = random.Random(int.from_bytes(os.urandom(4)))
    model_dir = tmp_path / "model"
    endings = []
    while not (model_dir / f"checkpoint_{STEPS}").exists():
        process = start(pretrain(text_cache, model_dir))
        # Wait for a new checkpoint, then kill the run at a random moment after it.
        before = len(list(model_dir.glob("checkpoint_*[0-9]")))
        while process.poll() is None and len(list(model_dir.glob("checkpoint_*[0-9]"))) <= before:
            time.sleep(0.05)
        time.sleep(generator.uniform(0, 0.5))
        if len(endings) < 2:
            process.send_signal(signal.SIGTERM if len(endings) == 1 else signal.SIGKILL)
        process.communicate(timeout=300)
        endings.append(process.returncode)
    assert len(endings) > 1, "the run finished before it could be killed"
    assert endings[0] == -signal.SIGKILL
    if len(endings) > 2:
        assert endings[1] == 75
    assert_equal(state(model_dir, STEPS), state(finished, STEPS))
    assert curve(finished) == curve(model_dir)


def test_a_finished_run_is_left_alone(text_cache, finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert trainer.pretrain.main(pretrain(text_cache, finished)[3:]) == 0
    assert "training is finished" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_every_checkpoint_is_evaluated(finished):
    others = {"5": {"validation": {"loss": 9.0}}, "60": {"train": {"loss": 8.0}}}
    (finished / "evaluation.json").write_text(json.dumps({"checkpoints": others}))
    flags = f"--model_dir={finished}", "--checkpoints=30,60", "--batch_size=16"
    result = done(command("trainer.evaluate", *flags))
    written = json.loads((finished / "evaluation.json").read_text())["checkpoints"]
    during = {
        line["step"]: line["metrics"]
        for line in read_metrics(str(finished))
        if line["split"] == "validation"
    }
    # Evaluations of other checkpoints and splits are kept.
    splits = {"5": ["validation"], "30": ["validation"], "60": ["train", "validation"]}
    assert {step: list(rows) for step, rows in written.items()} == splits
    for step in (30, 60):
        # Another batch size changes the order of float32 sums.
        for name, value in during[step].items():
            assert written[str(step)]["validation"][name] == pytest.approx(value, rel=1e-5)
        assert f"{written[str(step)]['validation']['loss']:.4f}" in result.stdout


@pytest.mark.torch
def test_the_configuration_of_another_run_is_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    written = json.loads(file.read_text())
    del written["sha256"]
    written["config"]["seed"] += 1
    file.write_text(json.dumps(seal.sealed(written)))
    said = rf"config.json is not of the run that wrote checkpoint_{STEPS} \(.*seed"
    for each, more in (
        (evaluate, ()),
        (generate, ("--prompt=a",)),
        (export, (f"--output={tmp_path}/export",)),
    ):
        with pytest.raises(UserError, match=said):
            each.main([f"--model_dir={tmp_path}/model", *more])


def test_a_run_on_many_devices_is_evaluated_on_one(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    written = json.loads(file.read_text())
    written["config"]["mesh"]["tensor"] = 4
    written["config"]["processes"] |= {"coordinator": "host:1", "count": 2, "index": 1}
    del written["sha256"]  # as an edit demands
    file.write_text(json.dumps(written))
    output = tmp_path / "metrics.json"
    evaluate.main([f"--model_dir={tmp_path}/model", f"--output={output}"])
    assert list(json.loads(output.read_text())["checkpoints"]) == [str(STEPS)]
    during = [line for line in read_metrics(str(finished)) if line["split"] == "validation"]
    assert f"{during[-1]['metrics']['loss']:.4f}" in capsys.readouterr().out


def test_print_config_shows_origins_and_starts_nothing(text_cache, tmp_path, capsys):
    arguments = pretrain(text_cache, tmp_path / "model", "--print_config")
    assert trainer.pretrain.main(arguments[3:]) == 0
    printed = capsys.readouterr().out
    assert "# preset t5_1_1_tiny" in printed
    assert "# vocabulary of the cache" in printed
    assert not (tmp_path / "model").exists()


def test_a_diverging_run_stops_with_the_state_before(text_cache, tmp_path):
    model_dir = tmp_path / "model"
    result = run(pretrain(text_cache, model_dir, "--optimizer.learning_rate=1e36"))
    says = ("update 2 was rejected", "gradients/", "checkpoint_1", "--on_nan=skip")
    assert_one_line(result.returncode, result.stderr, *says)
    assert (model_dir / "checkpoint_1").exists()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state(model_dir, 1)["params"]))


def test_missing_weights_and_biases_are_named(text_cache, tmp_path):
    # As if it were not installed, even if it is.
    (tmp_path / "wandb.py").write_text("raise ImportError")
    result = completed(
        pretrain(text_cache, tmp_path / "model", "--metrics.wandb=project"),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert_one_line(result.returncode, result.stderr, "[wandb]")


@pytest.mark.slow
def test_a_full_disk_is_named(text_cache, tmp_path):
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        result = completed(pretrain(text_cache, mounted / "model", "--model.emb_dim=512"))
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)
    assert_one_line(result.returncode, result.stderr, "disk is full")


WRONG = {
    "task without inputs": (["--task=python_docs_autoregressive_lm"], "lm_small"),
    "targets too short": (["--lengths.targets=10"], "set it to 14"),
    "too many sentinels": (["--lengths.inputs=2048", "--lengths.targets=456"], "114 sentinels"),
    "vocabulary too small": (["--model.vocab_size=128"], "700 ids"),
    "another seed": (["--seed=5"], "seed was 0, is 5"),
    "a file in the way": (["--model_dir=setup.py/model"], "file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_clear_line(case, text_cache, finished, tmp_path, capsys):
    flags, says = WRONG[case]
    (tmp_path / "file").write_text("")
    flags = [flag.replace("setup.py", str(tmp_path / "file")) for flag in flags]
    before = sorted(path.name for path in finished.iterdir())
    flags = pretrain(text_cache, finished, *flags)[3:]
    assert_one_line(*ended("trainer.pretrain", flags, capsys), says)
    assert sorted(path.name for path in finished.iterdir()) == before


def test_evaluating_nothing_is_one_clear_line(finished, tmp_path, capsys):
    def one_line(folder, *flags, says):
        flags = [f"--model_dir={folder}", *flags]
        assert_one_line(*ended("trainer.evaluate", flags, capsys), *says)

    one_line(tmp_path, says=["trainer.pretrain"])
    one_line(finished, "--steps=7", says=["no checkpoint of step 7", "60"])
    one_line(finished, "--split=test", says=["no split test"])


def test_a_damaged_row_ends_a_run_that_has_saved_its_updates(text_cache, tmp_path, capsys):
    cache, model = tmp_path / "cache" / TASK, tmp_path / "model"
    shutil.copytree(text_cache, cache)
    shard = max(cache.glob("train.tfrecord-*"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    flags = runs.pretrain(
        *(cache.parent, model, "--train_steps=5000", "--batch_size=64", "--data.shuffle=none"),
        *("--evaluation.every_steps=0", "--checkpoint.every_steps=5000"),
    )
    code, errors = ended("trainer.pretrain", flags[3:], capsys)
    assert_one_line(code, errors, "is corrupt in row")
    (saved,) = model.glob("checkpoint_*")
    assert int(saved.name.removeprefix("checkpoint_")) > 0


def test_a_finished_cosine_is_not_restarted_unasked(text_cache, tmp_path):
    flags = ("--optimizer.schedule=constant * cosine_decay", "--optimizer.steps_per_cycle=3")
    flags += ("--optimizer.warmup_steps=1",)
    model_dir = tmp_path / "model"
    done(pretrain(text_cache, model_dir, *flags, "--train_steps=4"))
    longer = pretrain(text_cache, model_dir, *flags, "--train_steps=8")
    refused = run(longer)
    assert_one_line(refused.returncode, refused.stderr, "at update 5", "agree with --rate_may_rise")
    assert not (model_dir / "checkpoint_8").exists()
    done([*longer, "--rate_may_rise"])
    assert (model_dir / "checkpoint_8").exists()
