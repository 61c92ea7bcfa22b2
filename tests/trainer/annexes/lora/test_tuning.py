"""Only LoRA's parameters change, and its sum is the model.

As a program it prints sums of what LoRA's updates on all devices leave, as JSON.
"""

import json

import jax
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support import eight_devices
from tests.support.parameters import slow_unless
from tests.trainer.engine.test_sharding import batch_of, program_of
from tests.trainer.engine.test_trainable import FLAGS, changed, numbers
from trainer.annexes.lora.options import LORA
from trainer.model.paths import named
from trainer.model.transformer import run_model

pytestmark = pytest.mark.processes

LORA_FLAGS = (*FLAGS, "--lora.rank=2", "--lora.alpha=8", "--lora.kernels=(query|wo)/kernel$")


@pytest.mark.parametrize("scan", ["false", "true"])
def test_only_loras_parameters_learn(scan):
    program = program_of(*LORA_FLAGS, f"--model.scan_layers={scan}")
    moved, state = changed(program)
    added = {name for name in named(state.params) if name.startswith(f"{LORA}/")}
    assert moved == added
    assert any("self_attention/query/kernel/a" in name for name in added)
    assert not any("key" in name for name in added)
    # The state of the optimizer has leaves of what learns alone, and counts.
    of_optimizer = named(state.opt_state)
    assert all("/lora/" in name or name.endswith("count") for name in of_optimizer)
    assert any("/lora/" in name for name in of_optimizer)


@pytest.mark.parametrize("microbatches", slow_unless({2}, [1, 2]))
def test_the_sum_is_the_model(microbatches):
    """Also in float32 logits with the two products apart, as the paper adds them."""
    program = program_of(*LORA_FLAGS, f"--microbatches={microbatches}")
    _, state = changed(program)
    merged = numbers(program.merged(state.params))
    params = numbers(state.params)
    kernel = "decoder/layers_0/mlp/wo/kernel"
    a, b = params[f"lora/{kernel}/a"], params[f"lora/{kernel}/b"]
    np.testing.assert_allclose(merged[kernel], params[kernel] + 8 / 2 * (a @ b), rtol=1e-6)
    assert np.abs(merged[kernel] - params[kernel]).max() > 1e-5
    assert merged.keys() == {name for name in params if not name.startswith("lora/")}
    x = np.random.default_rng(0).normal(size=(5, len(a))).astype(np.float32)
    apart = x @ params[kernel] + 4 * ((x @ a) @ b)
    np.testing.assert_allclose(x @ merged[kernel], apart, atol=1e-5)
    tuned = run_model(program._model, program.tuning.merged(state.params), batch_of(0))
    whole = jax.tree.map(np.array, program.merged(state.params))
    np.testing.assert_allclose(run_model(program._model, whole, batch_of(0)), tuned, atol=1e-5)
    # The evaluation of the run's parameters is that of the merged ones.
    alone = program_of(*FLAGS)
    own = alone.evaluation_step(program.merged(state.params), batch_of(0))
    assert program.evaluation_step(state.params, batch_of(0))["loss"][0] == own["loss"][0]


def test_at_first_the_model_is_as_without_lora():
    program, alone = program_of(*LORA_FLAGS), program_of(*FLAGS)
    merged = numbers(program.merged(program.initial_state().params))
    for name, value in numbers(alone.initial_state().params).items():
        np.testing.assert_array_equal(merged[name], value)


def test_norms_are_those_of_what_learns():
    program = program_of(*LORA_FLAGS, "--metrics.norms_every_steps=1")
    state = program.initial_state()
    found = program.norms.by_name(program.norms(state, batch_of(0)))
    assert "weight_gradient_rms/lora/decoder/layers_0/mlp/wo/kernel/b" in found
    assert all("/lora/" in name for name in found)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--lora.rank=2", "--lora.kernels=nope"), "--lora.kernels=nope matches no parameter"),
        (("--lora.rank=2", "--lora.kernels=norm/scale"), "is not a matrix"),
        (("--lora.alpha=2",), "has no effect without --lora.rank"),
    ],
)
def test_mistakes_are_one_line(flags, says):
    with pytest.raises(UserError, match=says):
        program_of(*FLAGS, *flags)


def sums(*flags):
    """Returns the root mean square of each parameter after updates of LoRA."""
    _, state = changed(program_of(*LORA_FLAGS, *flags))
    return {name: float(np.sqrt(np.mean(leaf**2))) for name, leaf in numbers(state.params).items()}


MESHES = {
    "fsdp": ["--mesh.data=2", "--mesh.fsdp=4"],
    "tensor": ["--mesh.tensor=2"],
    "both": ["--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"],
}


@pytest.mark.processes
@pytest.mark.parametrize("mesh", slow_unless({"both"}, MESHES))
def test_on_a_mesh_lora_learns_the_same(mesh):
    found = eight_devices.run(__file__, *MESHES[mesh])
    assert found == pytest.approx(sums(), rel=1e-4, abs=1e-7)


if __name__ == "__main__":
    import sys

    print(json.dumps(sums(*sys.argv[1:])))
