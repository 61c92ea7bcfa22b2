"""Equal bits of two runs: the flag of XLA on GPUs, and what a run says of it."""

import json
import os
import shutil

import pytest

from tasks.terminal.command_line import UserError
from tests.support.processes import completed, started
from tests.support.runs import state
from tests.support.trees import same
from tests.trainer.engine.test_processes import pretrain
from trainer.engine import determinism
from trainer.engine.determinism import GPU_FLAG, xla_flags
from trainer.reporting.software import save_software

pytestmark = pytest.mark.processes

CUDA = ["jax_plugins.xla_cuda12"]


@pytest.mark.parametrize(
    ("environment", "plugins", "deterministic", "flags"),
    [
        ({}, CUDA, True, f"{GPU_FLAG}=true"),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["xla_cuda13"], True, f"{GPU_FLAG}=true"),
        ({"JAX_PLATFORMS": "rocm"}, ["jax_plugins.xla_rocm60"], True, f"{GPU_FLAG}=true"),
        ({"XLA_FLAGS": "--xla_a=1"}, CUDA, True, f"--xla_a=1 {GPU_FLAG}=true"),
        # The user has decided.
        ({"XLA_FLAGS": f"{GPU_FLAG}=false"}, CUDA, True, f"{GPU_FLAG}=false"),
        ({"XLA_FLAGS": "--xla_a=1"}, CUDA, False, "--xla_a=1"),
        # No GPU can be found.
        ({}, [], True, ""),
        ({}, ["libtpu"], True, ""),
        ({"JAX_PLATFORMS": "cpu"}, CUDA, True, ""),
        ({"JAX_PLATFORMS": "tpu,cpu", "XLA_FLAGS": "--xla_a=1"}, CUDA, True, "--xla_a=1"),
    ],
)
def test_the_flag_is_set_where_gpus_may_be_found(environment, plugins, deterministic, flags):
    assert xla_flags(environment, plugins, deterministic) == flags


def test_gpus_that_are_in_use_ignore_the_flag(monkeypatch):
    monkeypatch.setattr(determinism, "_plugins", lambda: CUDA)
    monkeypatch.setattr(determinism, "_uses_gpus", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    with pytest.raises(UserError, match="has already used its GPUs"):
        determinism.set_flags(True)
    determinism.set_flags(False)
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"
    monkeypatch.setattr(determinism, "_uses_gpus", lambda: False)
    determinism.set_flags(True)
    assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {GPU_FLAG}=true"


def test_a_cpu_is_no_gpu_in_use():
    import jax

    assert jax.devices()
    assert not determinism._uses_gpus()


@pytest.mark.parametrize(
    ("hardware", "says"),
    [
        ({"platform": "cpu", "cores": 2}, "identical results on 2 core(s) of the same kind of CPU"),
        (
            {"platform": "gpu", "devices": 8, "deterministic": True},
            "identical results on 8 device(s) of the same kind",
        ),
        ({"platform": "gpu", "devices": 8, "deterministic": False}, "differ by rounding"),
        ({"platform": "tpu", "devices": 8}, "identical results on 8 device(s) of the same kind"),
    ],
)
def test_the_promise_is_that_of_the_platform(hardware, says):
    assert says in determinism.said(hardware)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{GPU_FLAG}=true", True),
        (GPU_FLAG, True),
        ("--xla_a=1 --xla_gpu_exclude_nondeterministic_ops=1", True),
        (f"{GPU_FLAG}=false", False),
        ("", False),
    ],
)
def test_what_is_promised_is_what_the_flags_say(flags, expected):
    assert determinism.are_deterministic(flags) == expected


def test_the_installed_xla_knows_the_flag():
    """XLA aborts the process if it does not know a flag."""
    made = started(
        "-c", "import jax; jax.devices()", env={**os.environ, "XLA_FLAGS": f"{GPU_FLAG}=true"}
    )
    assert made.returncode == 0, made.stderr


def run(cache, model_dir, *flags, **environment):
    return completed(
        pretrain(cache, model_dir, "--evaluation.every_steps=0", *flags),
        env={**os.environ, **environment},
    )


def test_another_version_of_jax_is_said_and_a_damaged_file_is_replaced(tmp_path):
    assert save_software(str(tmp_path)) == []
    assert save_software(str(tmp_path)) == []
    file = tmp_path / "software.json"
    found = json.loads(file.read_text())
    assert found["hardware"]["cores"] == determinism.cores()
    now = found["versions"]["jax"]
    found["versions"] |= {"jax": "0.0.1", "python": "3.0"}
    file.write_text(json.dumps(found))
    assert save_software(str(tmp_path)) == [f"jax was 0.0.1, is {now}"]
    file.write_text("{")
    assert save_software(str(tmp_path)) == []
    # One of a version that did not record the hardware.
    file.write_text(json.dumps({"commit": None, "versions": {}}))
    assert save_software(str(tmp_path)) == []


@pytest.mark.slow
def test_runs_on_as_many_cores_are_equal_bit_for_bit(text_cache, tmp_path):
    """Runs on one core and on two differ, which is why the number is part of the promise."""
    # XLA divides only large operations among cores.
    flags = ["--train_steps=6", "--batch_size=16", "--lengths.inputs=256", "--lengths.targets=58"]
    flags.append("--model.vocab_size=8192")
    states, how = [], {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    for name, cores in {"a": "2", "b": "2", "c": "1"}.items():
        made = run(text_cache, tmp_path / name, *flags, NPROC=cores, **how)
        assert made.returncode == 0, made.stderr
        states.append(state(tmp_path / name, 6))
    assert same(states[0], states[1])
    assert not same(states[0], states[2])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["einsum", "dot_product", "cudnn"])
def test_two_runs_on_a_gpu_are_equal_bit_for_bit(text_cache, tmp_path, attention):
    """Each run compiles for itself, so that both choose their kernels."""
    states = []
    for name in ("a", "b"):
        made = run(
            text_cache,
            tmp_path / name,
            *("--train_steps=20", "--model.dtype=bfloat16", f"--model.attention={attention}"),
            JAX_PLATFORMS="cuda",
            JAX_DISABLE_MOST_OPTIMIZATIONS="false",
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / f"{name}_compiled"),
        )
        assert made.returncode == 0, made.stderr
        assert "with identical results on" in made.stdout
        states.append(state(tmp_path / name, 20))
    assert same(*states)
