"""Updates in shares of the parameters equal updates of all parameters.

As a program, `test_shares.py FOLDER`, it prints the results of runs on eight devices as JSON.
"""

import itertools
import json
import os
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

from tests.support import eight_devices
from tests.support.runs import config_of, program_of
from tests.trainer.engine.test_sharding import Chip, batch_of, bits, bytes_held, specs
from trainer.config import MeshConfig
from trainer.config.mesh import AXES
from trainer.engine.sharding import divides_update, make_mesh, put_batch

B, V = 16, 512  # rows of test_sharding, and more tokens
UPDATES, FEW = 50, 5
# Every kernel and table has at least 2**16 elements; moments are factored, as from 128 x 128 on.
SIZES = {"vocab_size": V, "emb_dim": 128, "num_heads": 4, "head_dim": 128, "mlp_dim": 512}
SMALL = [
    *(f"--model.{name}={size}" for name, size in SIZES.items()),
    *("--model.num_encoder_layers=1", "--model.num_decoder_layers=1"),
    *("--model.dropout_rate=0.1", f"--batch_size={B}"),
]
# Scanned layers, moments of every element, and gradients summed over parts of the batch.
SCANNED = [
    *("--model.scan_layers=true", "--model.num_encoder_layers=2", "--microbatches=2"),
    *("--optimizer.name=adamw", "--optimizer.learning_rate=1e-3", "--model.dtype=bfloat16"),
]
# Name -> flags, number of updates.
RUNS = {
    "shares": ([], UPDATES),
    "fsdp": (["--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"], FEW),
    "scanned": (SCANNED, FEW),
}
ALONE = ("shares", "scanned")


def program(*flags):
    return program_of(config_of(*SMALL, *flags, preset="t5_1_1_tiny"))


def updated(program, state, first=0, last=UPDATES):
    """Returns (the state after updates `first` to `last`, the loss after each)."""
    losses = []
    for step in range(first, last):
        state = program.train_step(state, put_batch(batch_of(step, True, V), program.mesh))
        total, weight = (float(part) for part in state.metrics["loss"])
        losses.append(total / weight)
    return state, losses


def results(made, updates):
    initial = made.initial_state()
    before = bits(initial.params)
    state, losses = updated(made, initial, last=updates)
    batch = put_batch(batch_of(updates, True, V), made.mesh)
    total, weight = made.evaluation_step(state.params, batch)["loss"]
    return {
        "initial": before, "losses": losses, "evaluated": float(total) / float(weight),
        "final": bits((state.params, state.opt_state)), "held": bytes_held(state),
        "params": specs(state.params), "opt_state": specs(state.opt_state),
    }  # fmt: skip


def main(folder):
    programs = {name: program(*flags) for name, (flags, _) in RUNS.items()}
    found = {name: results(made, RUNS[name][1]) for name, made in programs.items()}
    # Saved in the middle, and restored on the same mesh and on another.
    half, one = UPDATES // 2, programs["shares"]
    state, _ = updated(one, one.initial_state(), last=half)
    path, checkpointer = os.path.join(folder, "half"), ocp.StandardCheckpointer()
    checkpointer.save(path, state)
    checkpointer.wait_until_finished()
    found["whole"] = specs(program("--mesh.divide_update=False").abstract_state().params)
    found["saved"] = bits((state.params, state.opt_state))
    for name in ("shares", "fsdp"):
        other = programs[name]
        restored = checkpointer.restore(path, other.abstract_state())
        same = bits((restored.params, restored.opt_state)) == found["saved"]
        state, losses = updated(other, restored, first=half)
        final = bits((state.params, state.opt_state))
        found[f"resumed {name}"] = {"same": same, "losses": losses, "final": final}
    print(json.dumps(found))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The results of RUNS on eight devices, and of runs resumed in their middle."""
    return eight_devices.run(__file__, str(tmp_path_factory.mktemp("shares")))


@pytest.fixture(scope="module")
def alone():
    assert jax.device_count() == 1
    return {name: results(program(*RUNS[name][0]), RUNS[name][1]) for name in ALONE}


@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_updates_equal_those_of_one_device(name, eight, alone):
    found, expected = eight[name], alone[name if name in ALONE else "shares"]
    assert found["initial"] == expected["initial"]
    near = {"rtol": 0, "atol": 2e-2 if name == "scanned" else 1e-5}
    updates = len(found["losses"])
    np.testing.assert_allclose(found["losses"], expected["losses"][:updates], **near)
    if name in ALONE:
        np.testing.assert_allclose(found["evaluated"], expected["evaluated"], **near)


@pytest.mark.parametrize(
    ("shape", "slices", "config", "divided"),
    [
        ((2, 4, 1), 1, MeshConfig(), True),
        ((4, 4, 1), 1, MeshConfig(), False),
        ((4, 4, 1), 1, MeshConfig(divide_update=True), True),
        ((4, 4, 1), 1, MeshConfig(tensor=2), True),
        ((2, 2, 1), 4, MeshConfig(), True),
        ((2, 2, 1), 1, MeshConfig(divide_update=False), False),
        ((1, 1, 1), 1, MeshConfig(divide_update=True), False),
    ],
)
def test_updates_are_divided_where_gradients_can_be(shape, slices, config, divided):
    places = [*itertools.product(*map(range, shape))]
    chips = [Chip(place, number) for number in range(slices) for place in places]
    assert divides_update(config, make_mesh(config, chips)) == divided


def test_gpus_divide_updates_on_any_number():
    gpus = [Chip((number, 0, 0), platform="gpu") for number in range(16)]
    mesh = Mesh(np.array(gpus).reshape(16, 1, 1), AXES)
    assert divides_update(MeshConfig(), mesh)


@pytest.mark.processes
def test_each_part_keeps_its_share_of_parameters_and_moments(eight, alone):
    kernel = "encoder/layers_0/mlp/wi_0/kernel"
    assert eight["shares"]["params"][kernel] == [["fsdp", "data"], "tensor"]
    assert eight["fsdp"]["params"][kernel] == [["fsdp", "data"], "tensor"]
    assert eight["whole"][kernel] == ["fsdp", "tensor"]
    for name in ("shares", "scanned", "fsdp"):
        places = eight[name]["params"]
        # Only scales and the bias by position are whole.
        whole = {path for path, axes in places.items() if "data" not in str(axes)}
        assert whole == {path for path in places if path.endswith(("scale", "rel_embedding"))}
    scanned = eight["scanned"]["params"]["decoder/decoder/mlp/wo/kernel"]
    assert scanned == [["tensor", "data"], None, "fsdp"]
    moments = eight["scanned"]["opt_state"]
    assert moments["0/mu/decoder/decoder/mlp/wo/kernel"] == scanned
    # An eighth, and factored moments and scales on every device.
    assert eight["shares"]["held"] < 0.14 * alone["shares"]["held"]


@pytest.mark.processes
def test_a_run_resumed_in_the_middle_has_the_same_bits(eight):
    for name in ("shares", "fsdp"):
        assert eight[f"resumed {name}"]["same"]
        np.testing.assert_allclose(
            eight[f"resumed {name}"]["losses"], eight["shares"]["losses"][UPDATES // 2 :], atol=1e-5
        )
    resumed = eight["resumed shares"]
    assert resumed["final"] == eight["shares"]["final"]
    assert resumed["losses"] == eight["shares"]["losses"][UPDATES // 2 :]


if __name__ == "__main__":
    main(*sys.argv[1:])
