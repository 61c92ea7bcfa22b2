"""Training with MARCH's parts: 8 devices as one, and bfloat16."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from trainer.engine.program import Program
from trainer.engine.sharding import put_batch
from trainer.pretrain import build_config

ROOT = pathlib.Path(__file__).parents[3]
B, S, L, V = 16, 12, 8, 64
# Sets of parts that go together; each part is in one of them.
MODELS = {
    "dropping": {
        "token_dropping": 2,
        "feed_forward": "none",
        "mixer": "values_relu",
        "dropout_rate": 0.1,
    },
    "merged": {
        "cross_attention": "merged",
        "feed_forward": "mixed",
        "mixer": "role_attention:vectors=6",
        "database_entries": 6,
    },
    "keys": {"cross_attention": "encoder_keys", "head_scaling": "halves"},
    "layerwise": {
        "cross_attention": "layerwise",
        "mixer": "summed_heads",
        "norm_placement": "pre_without_mixer_residual",
    },
}
SIZES = {"vocab_size": V, "emb_dim": 16, "num_heads": 4, "head_dim": 8, "mlp_dim": 32}
MESH = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2")


def program_of(name, *flags):
    settings = {**SIZES, "tied_logits": "false", **MODELS[name]}
    own = [f"--model.{field}={value}" for field, value in settings.items()]
    config, _ = build_config("t5_1_0_tiny", [*own, f"--batch_size={B}", *flags])
    return Program(types.SimpleNamespace(config=config))


def batch_of(step):
    random = np.random.default_rng(step)

    def tokens(length):
        there = np.arange(length) < np.linspace(2, length, B)[:, None]
        return np.where(there, random.integers(3, V, (B, length)), 0).astype(np.int32)

    targets = tokens(L)
    return {
        "encoder_input_tokens": tokens(S),
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }


def losses(program, steps, repeat=False):
    state, found = program.initial_state(), []
    for step in range(steps):
        state = state.replace(metrics=program.zero_metrics())
        batch = put_batch(batch_of(0 if repeat else step), program.mesh)
        state = program.train_step(state, batch)
        total, weight = state.metrics["loss"]
        found.append(float(total) / float(weight))
    return found


def main():
    assert len(jax.devices()) == 8
    print(json.dumps({name: losses(program_of(name, *MESH), 3) for name in MODELS}))


@pytest.mark.slow
def test_eight_devices_equal_one():
    made = subprocess.run(
        [sys.executable, __file__],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr
    for name, eight in json.loads(made.stdout).items():
        one = losses(program_of(name), 3)
        np.testing.assert_allclose(eight, one, atol=1e-5, err_msg=name)
        assert one[0] != one[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_bfloat16_model_learns_a_repeated_batch(name):
    flags = ["--model.dtype=bfloat16", "--optimizer.schedule=constant"]
    found = losses(program_of(name, *flags, "--optimizer.learning_rate=0.05"), 15, repeat=True)
    assert found[-1] < 0.8 * found[0]


if __name__ == "__main__":
    main()
