"""Encoders with conditional queries and memory tokens: eight devices equal one.

As a program it prints the losses of runs on all devices as JSON.
"""

import json
import pathlib
import types

import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support import eight_devices
from trainer.config.from_flags import build_config
from trainer.config.mesh import check_dimensions
from trainer.config.presets import model_preset
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch

ROOT = pathlib.Path(__file__).parents[3]
B, S, L, V = 16, 12, 8, 128
SIZES = {"vocab_size": V, "emb_dim": 16, "num_heads": 4, "head_dim": 8, "mlp_dim": 32}
SIZES |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "dropout_rate": 0.1}
MESH = ["--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"]
VARIANTS = {
    "only_cdq": ["--model.mixer=cdq"],
    "half_cdq_memory": ["--model.mixer=cdq:conditional_heads=2", "--model.memory_tokens=3"],
}


def batch_of(step):
    rng = np.random.default_rng(step)
    targets = rng.integers(3, V, (B, L)).astype(np.int32)
    return {
        "encoder_input_tokens": rng.integers(3, V, (B, S)).astype(np.int32)
        * (np.arange(S) < np.linspace(1, S, B)[:, None]),
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": np.ones_like(targets),
    }


def losses(*flags):
    sizes = [f"--model.{name}={size}" for name, size in SIZES.items()]
    config, _ = build_config("t5_1_0_tiny", [*sizes, f"--batch_size={B}", *flags])
    program = Program(types.SimpleNamespace(config=config))
    state, found = program.initial_state(), []
    for step in range(4):
        state = program.train_step(state, put_batch(batch_of(step), program.mesh))
        total, weight = (float(part) for part in state.metrics["loss"])
        found.append(total / weight)
    return found


@pytest.mark.slow
def test_eight_devices_equal_one():
    for name, eight in eight_devices.run(__file__).items():
        one = losses(*VARIANTS[name])
        np.testing.assert_allclose(eight, one, atol=1e-5, err_msg=name)
        assert one[0] != one[-1]


def test_conditional_heads_are_kept_whole():
    model = model_preset("t5_1_0_base_cdq")
    sizes = {"data": 1, "fsdp": 1, "tensor": 4}
    with pytest.raises(UserError, match="conditional_heads 6 does not divide by 4"):
        check_dimensions(sizes, "standard", model, 8, 1)
    check_dimensions(sizes, "standard", model_preset("t5_1_0_base_only_cdq"), 8, 1)


if __name__ == "__main__":
    print(json.dumps({name: losses(*flags, *MESH) for name, flags in VARIANTS.items()}))
