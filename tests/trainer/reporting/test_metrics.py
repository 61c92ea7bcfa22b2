"""Metrics: writers, speed, profiles and evaluation; lines that a killed run left behind."""

import json
import os
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.support.runs import run_of
from tests.support.servers.gcs import GcsServer
from trainer.config.from_flags import build_config
from trainer.engine.evaluator import Evaluator
from trainer.engine.hardware import peak_flops, peak_memory
from trainer.engine.metrics import means, perplexity
from trainer.engine.program import Program
from trainer.engine.sharding import make_mesh
from trainer.reporting.metrics import MetricsWriter, read_metrics
from trainer.reporting.profile import Profile
from trainer.reporting.speed import Speed, shown


def config_of(model_dir, *flags):
    return build_config("t5_1_1_tiny", [f"--model_dir={model_dir}", *flags])[0]


def test_lines_after_the_checkpoint_are_removed(tmp_path):
    writer = MetricsWriter(config_of(tmp_path), 0)
    for step in (5, 10, 15):
        writer.write(step, "train", {"loss": 1.0 / step}, {"steps_per_second": 2.0})
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "spl')  # cut short by a kill
    writer = MetricsWriter(config_of(tmp_path), 10)
    writer.write(15, "validation", {"loss": 7.0})
    writer.close()
    lines = read_metrics(str(tmp_path))
    places = [(line["step"], line["split"]) for line in lines]
    assert places == [(5, "train"), (10, "train"), (15, "validation")]
    assert lines[0]["speed"] == {"steps_per_second": 2.0}
    assert "speed" not in lines[2]
    (tmp_path / "b").mkdir()
    writer = MetricsWriter(config_of(tmp_path / "b", "--metrics.tensorboard=false"), 0)
    writer.write(1, "train", {"loss": 1.5}, {})
    writer.close()
    assert read_metrics(str(tmp_path / "b"))[0]["speed"] == {}


# In a process of its own, whose memory is small.
MEMORY = """
import numpy as np
from trainer.engine.hardware import peak_memory
print(peak_memory()["host_memory_bytes"])
held = np.ones(40 << 20)
print(peak_memory()["host_memory_bytes"])
del held
print(peak_memory()["host_memory_bytes"])
"""


@pytest.mark.processes
def test_memory_is_the_most_so_far(monkeypatch):
    # A process inherits the peak of the one that starts it; the one in between is small.
    between = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    )
    found = started("-c", between, MEMORY, check=True)
    before, after, last = map(int, found.stdout.split())
    assert last >= after > before + (64 << 20)
    assert set(peak_memory()) == {"host_memory_bytes"}  # CPUs do not count a device's memory

    class Device:
        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return {"peak_bytes_in_use": self.peak}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(5), Device(9), Device(7)])
    assert peak_memory()["device_memory_bytes"] == 9


def test_only_one_of_several_processes_writes(tmp_path):
    writer = MetricsWriter(config_of(tmp_path, "--metrics.wandb=project"), 0, writing=False)
    writer.write(5, "train", {"loss": 1.0})
    writer.close()
    assert list(tmp_path.iterdir()) == []


# Weights & Biases without its server, in a process of its own because it leaves threads and hooks.
WRITES = """
import sys
from trainer.reporting.metrics import MetricsWriter
from trainer.config.from_flags import build_config
for first in (0, 5):
    arguments = [f"--model_dir={sys.argv[1]}", "--metrics.wandb=shelf", "--train_steps=77"]
    writer = MetricsWriter(build_config("t5_1_1_tiny", arguments)[0], first)
    writer.write(first + 5, "train", {"loss": 0.625 + first}, {"steps_per_second": 3.25})
    writer.close()
"""


def with_wandb(program, folder, **environment):
    environment = {**os.environ, "HOME": str(folder), "WANDB_SILENT": "true", **environment}
    environment.pop("WANDB_API_KEY", None)
    return started("-c", program, str(folder), env=environment, stdin=subprocess.DEVNULL)


@pytest.mark.wandb
def test_weights_and_biases_gets_the_same_numbers(tmp_path):
    pytest.importorskip("wandb")
    done = with_wandb(WRITES, tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    identity = json.loads((tmp_path / "wandb.json").read_text())["id"]
    # A resumed run continues the same run of Weights & Biases.
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{identity}.wandb"] * 2
    for path, loss in zip(files, (b"0.625", b"5.625"), strict=True):
        data = path.read_bytes()
        for text in (b"shelf", identity.encode(), b"train/loss", b"train/steps_per_second", b"77"):
            assert text in data
        assert loss in data
        assert b"3.25" in data


@pytest.mark.wandb
def test_missing_or_failing_weights_and_biases_is_one_clear_line(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    refused = with_wandb(WRITES, tmp_path, WANDB_MODE="online")
    last = refused.stderr.splitlines()[-1]
    assert "UserError: Weights & Biases does not start: No API key configured" in last
    config = config_of(tmp_path, "--metrics.wandb=project")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install .*\[wandb\]'"):
        MetricsWriter(config, 0)


TERAFLOPS = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989}
TERAFLOPS |= {"NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362, "NVIDIA L4": 121, "TPU v4": 275}
TERAFLOPS |= {"TPU v5 lite": 197, "TPU v5p": 459, "TPU v6 lite": 918, "cpu": None}


@pytest.mark.parametrize(("kind", "teraflops"), [*TERAFLOPS.items(), ("NVIDIA L40", None)])
def test_peak_flops_are_those_of_the_device(kind, teraflops):
    assert peak_flops(kind) == (teraflops and teraflops * 1e12)


def test_speed_is_measured_since_the_last_report(monkeypatch):
    now = iter([100.0, 110.0, 115.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    speed = Speed(lambda step: 1000 * step, lambda step: 6 * 10**12 * step, peak_flops=20e12)
    assert speed.since_last(5) == {}
    speed.blocking.seconds += 0.25
    rates = speed.since_last(10)
    rate = {"steps_per_second": 0.5, "tokens_per_second": 500.0, "mfu": 0.15}
    assert rates == {"checkpoint_blocking_seconds": 0.25, **rate}
    assert shown(rates) == ["500 tokens/s", "MFU 15.0%"]
    speed.peak_flops = None
    assert speed.since_last(20) == {"steps_per_second": 2.0, "tokens_per_second": 2000.0}


def test_means_and_perplexity():
    assert means({"loss": (6.0, 4.0), "none": (0.0, 0.0)}) == {"loss": 1.5, "none": 0.0}
    assert perplexity(1000.0) == float("inf")


def evaluated(cache, preset, task, *flags):
    """Returns the untrained model's metrics on the validation split, and the cache's manifest."""
    run = run_of(cache, "--batch_size=8", *flags, preset=preset, task=task, lengths=(None, 64))
    program = Program(run)
    evaluator = Evaluator(run, "validation", program.evaluation_step, program.mesh)
    return evaluator(program.initial_state().params)["validation"], run.data.tasks[0].manifest


def test_bits_per_byte_is_the_cost_of_coding_the_documents(text_cache):
    layer = "--model.num_decoder_layers=1"
    found, manifest = evaluated(text_cache, "lm_tiny", "python_docs_autoregressive_lm", layer)
    bits = found["loss"] * found["tokens"] / np.log(2)
    text = manifest.total("validation", "text_bytes")
    # Every token of the split is coded, and one EOS per window.
    assert found["tokens"] > manifest.total("validation", "tokens")
    assert found["bits_per_byte"] == pytest.approx(bits / text, rel=1e-12)

    documents = (text_cache.parents[1] / "validation.txt").read_text().splitlines()
    words = sum(len(document.split()) for document in documents)
    per_word = np.exp(found["loss"] * found["tokens"] / words)
    assert found["word_perplexity"] == pytest.approx(per_word, rel=1e-12)
    # An untrained model gets no row right. All rows but the last of a shard are full.
    assert found["sequence_accuracy"] == 0
    assert found["max_targets_length"] == 64
    assert 0.9 * found["loss"] < found["training_loss"] < found["loss"]
    assert 1 < found["mean_label"] < 700


def test_bits_per_byte_count_only_the_predicted_part(text_cache):
    layer = "--model.num_decoder_layers=1"
    found, manifest = evaluated(text_cache, "lm_tiny", "python_docs_decoder_prefix_lm", layer)
    tokens = manifest.total("validation", "tokens")
    assert 0.3 * tokens < found["tokens"] < 0.7 * tokens
    share = found["tokens"] / tokens
    bits = found["loss"] * found["tokens"] / np.log(2)
    text = share * manifest.total("validation", "text_bytes")
    assert found["bits_per_byte"] == pytest.approx(bits / text, rel=1e-12)
    lengths = ["--lengths.inputs=64", "--lengths.targets=18"]
    found, _ = evaluated(text_cache, "t5_1_1_tiny", "python_docs_span_corruption", *lengths)
    assert "bits_per_byte" not in found


def test_metrics_that_layers_sow_are_reported_as_means(text_cache):
    run = run_of(text_cache)
    sums = {"loss": (6.0, 4.0), "z_loss": (1.0, 4.0), "accuracy": (0.0, 4.0), "own": (3.0, 4.0)}
    evaluator = Evaluator(run, "validation", lambda *_: sums, make_mesh(run.config.mesh))
    found = evaluator({})["validation"]
    assert (found["loss"], found["own"], "z_loss" in found) == (1.5, 0.75, False)


def profiled(model_dir, last):
    """Makes updates up to `last` as the loop does, and profiles the third and the fourth."""
    double = jax.jit(lambda x: 2 * x)
    state = np.float32(1)
    with Profile(config_of(model_dir, "--profile_steps=3:4")) as profile:
        for step in range(1, last + 1):
            with profile.update(step):
                state = double(state)
            profile.after(step, state)


def steps_of(trace):
    """Returns the numbers of the updates in the bytes of a HOST.xplane.pb, as XProf finds them."""
    events = [
        event
        for plane in jax.profiler.ProfileData.from_serialized_xspace(trace).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    return sorted(dict(event.stats)["step_num"] for event in events)


@pytest.mark.parametrize(("last", "found"), [(6, [3, 4]), (3, [3])])
def test_the_chosen_updates_are_profiled(tmp_path, last, found):
    profiled(tmp_path, last)  # a run that ends during the profile still writes it
    (trace,) = (tmp_path / "profile/plugins/profile").glob("*/*.xplane.pb")
    assert steps_of(trace.read_bytes()) == found
    assert (trace.parent / "perfetto_trace.json.gz").exists()


@pytest.mark.google
def test_a_profile_goes_into_a_bucket_that_fails(in_bucket):
    with GcsServer(faults=0.2, seed=1) as gcs:
        in_bucket(gcs)
        profiled("gs://bucket/model", 4)
    names = gcs.names("model/profile/")
    (trace,) = (name for name in names if name.endswith(".xplane.pb"))
    assert re.fullmatch(r"model/profile/plugins/profile/[\d_]{19}/[^/]+\.xplane\.pb", trace)
    assert steps_of(gcs.read(trace)) == [3, 4]
    assert f"{trace.rpartition('/')[0]}/perfetto_trace.json.gz" in names


@pytest.mark.google
def test_a_profile_that_cannot_be_written_is_one_warning(in_bucket, tmp_path, capsys):
    (tmp_path / "profile").write_text("in the way")
    with GcsServer(denied=["bucket"]) as gcs:
        in_bucket(gcs)
        for model_dir, why in ((tmp_path, "NotADirectory"), ("gs://bucket/model", "permission")):
            profiled(model_dir, 5)
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"warning: --profile_steps=3:4: no profile in {model_dir}/prof")
            assert why in line
    # Another profiler of this process, such as a user's own, has the device.
    with jax.profiler.trace(str(tmp_path / "other")):
        profiled(tmp_path / "second", 5)
    assert "warning: --profile_steps=3:4" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ['{"stdp": 1}', "5", "[]", '{"step": 1, "spl'])
def test_a_damaged_line_is_named_unless_a_kill_cut_the_last(tmp_path, damage):
    good = json.dumps({"step": 1, "split": "train", "metrics": {}})
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{good}\n{damage}\n{good}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2"):
        read_metrics(str(tmp_path))
    path.write_text(f"{good}\n{damage}")
    assert len(read_metrics(str(tmp_path))) == 1


@pytest.mark.parametrize("lost", [None, 0, 2, 5, "all"])
def test_lines_that_are_lost_before_a_checkpoint_are_noticed(tmp_path, lost, capsys):
    config = config_of(tmp_path, "--metrics.tensorboard=false")
    writer = MetricsWriter(config, 0)
    for step in range(1, 7):
        writer.write(step, "train", {"loss": 1 / step}, {"steps": 3.0})
    digest = writer.digest(6)
    writer.write(6, "validation", {"loss": 1.0})  # before the checkpoint or after it
    assert writer.digest(6) == digest
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = [] if lost == "all" else [line for n, line in enumerate(lines) if n != lost]
    path.write_text("".join(kept))
    if lost == "all":
        path.unlink()
        assert writer.digest(6) is None
    MetricsWriter(config, 6, digest=digest)
    noticed = "metrics.jsonl has lost or changed lines up to step 6: " in capsys.readouterr().err
    assert noticed == (lost is not None)
    assert len(read_metrics(str(tmp_path))) == len(kept)
