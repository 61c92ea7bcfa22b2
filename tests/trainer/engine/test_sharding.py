"""Runs on any mesh equal the run on one device, and arrays are placed by the rules.

As a program, `test_sharding.py FOLDER` or `test_sharding.py models`, it prints the results of runs
on all devices as JSON.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tasks.terminal.command_line import UserError
from tests.support import eight_devices, runs
from tests.support.cases import entries
from tests.support.runs import config_of
from trainer.config import MeshConfig
from trainer.config.mesh import RULES, check_dimensions
from trainer.config.presets import MODEL_PRESETS
from trainer.engine.sharding import HostPart, host_part, make_mesh, parameter_shardings, put_batch
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params, logical_axes

B, L, V = 16, 8, 128
# Positions that no other dimension equals.
LONG = 24
SIZES = {"vocab_size": V, "emb_dim": 16, "num_heads": 4, "head_dim": 8, "mlp_dim": 32}
SMALL = [
    *(f"--model.{name}={size}" for name, size in SIZES.items()),
    *("--model.num_decoder_layers=1", "--model.tied_logits=false"),
    *("--model.dropout_rate=0.1", f"--batch_size={B}"),
]
# Scanned layers, whose parameters have one more axis.
SCANNED = ["--model.scan_layers=true", "--model.remat=full", "--model.num_decoder_layers=2"]
MESHES = {
    "data": [],
    "fsdp": ["--mesh.data=2", "--mesh.fsdp=-1"],
    "tensor": ["--mesh.num_partitions=4"],
    "2d": ["--mesh.data=1", "--mesh.fsdp=-1", "--mesh.tensor=4", "--mesh.rules=2d"],
    "scanned": ["--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", *SCANNED],
}
ALONE = {"plain": [], "scanned": SCANNED}
# Meshes whose norms are compared: the one of the most axes, and scanned layers.
NORMS = ("2d", "scanned")
CUBE = ["--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"]
MOVES = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all)(-start)?\(")
# Presets of annexes, and the core's with their parts: preset -> flags.
OTHERS = entries("SHARDED")


def program_of(*flags, preset="lm_tiny"):
    return runs.program_of(config_of(*SMALL, *flags, preset=preset))


def batch_of(step, encodes=False, vocabulary=V):
    rng = np.random.default_rng(step)
    targets = rng.integers(3, vocabulary, (B, L)).astype(np.int32)
    there = np.arange(L) < np.linspace(1, L, B)[:, None]
    return {
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets * there,
        "decoder_loss_weights": there.astype(np.int32),
        **({"encoder_input_tokens": targets[::-1] * there} if encodes else {}),
    }


def bits(tree):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def specs(tree):
    return {path: list(leaf.sharding.spec) for path, leaf in named(tree).items()}


def bytes_held(state):
    """Returns the bytes of the state on the first device."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def run(program, folder=None, norms=False):
    """Returns the results of five steps; saves the final state in `folder`, if given."""
    import orbax.checkpoint as ocp

    state, encodes = program.initial_state(), "encoder" in program.spec.stacks
    result = {"initial": bits(state.params), "losses": []}
    for step in range(5):
        batch = put_batch(batch_of(step, encodes), program.mesh)
        if norms and step == 4:
            result["norms"] = program.norms.by_name(program.norms(state, batch))
        state = program.train_step(state, batch)
        total, weight = (float(part) for part in state.metrics["loss"])
        result["losses"].append(total / weight)
    result["metrics"] = {name: [*map(float, each)] for name, each in state.metrics.items()}
    result |= {"final": bits(state.params), "held": bytes_held(state)}
    result |= {"params": specs(state.params), "opt_state": specs(state.opt_state)}
    result["line"] = program.describe()[1]
    if folder:
        checkpointer = ocp.StandardCheckpointer()
        checkpointer.save(folder, state)
        checkpointer.wait_until_finished()
    return result


def text_of(program, batch):
    """Returns the text of the compiled update."""
    return program.train_step.lower(program.abstract_state(), batch).compile().as_text()


def main(argument):
    import orbax.checkpoint as ocp

    if argument == "models":
        found = {name: run(program_of(*CUBE, *OTHERS[name], preset=name)) for name in OTHERS}
        print(json.dumps(found))
        return
    folder, results = argument, {}
    for name, flags in MESHES.items():
        program = program_of(*flags)
        results[name] = run(program, os.path.join(folder, name), norms=name in NORMS)
        if name == "2d":
            other = ocp.StandardCheckpointer().restore(
                os.path.join(folder, "data"), program.abstract_state()
            )
            results["restored"] = {"final": bits(other.params), "params": specs(other.params)}
    for name, flags, length in (
        ("fsdp_program", MESHES["fsdp"], LONG),
        ("microbatches", ("--microbatches=2",), L),
    ):
        rows = {name: np.ones((B, length), np.int32) for name in batch_of(0)}
        results[name] = text_of(program_of(*flags), rows)
    print(json.dumps(results))


@pytest.fixture(scope="module")
def meshes(tmp_path_factory):
    """The results of each of MESHES on eight devices."""
    return eight_devices.run(__file__, str(tmp_path_factory.mktemp("meshes")))


@pytest.fixture(scope="module")
def alone():
    """The results on one device, of unscanned and scanned layers."""
    assert jax.device_count() == 1
    return {name: run(program_of(*flags), norms=True) for name, flags in ALONE.items()}


@pytest.mark.processes
@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_equal_one(name, meshes, alone):
    alone = alone["scanned" if name == "scanned" else "plain"]
    assert meshes[name]["initial"] == alone["initial"]
    assert alone["final"] != alone["initial"]
    np.testing.assert_allclose(meshes[name]["losses"], alone["losses"], atol=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "single"), [("2d", "plain"), ("scanned", "scanned")])
def test_norms_on_eight_devices_are_those_of_one(name, single, meshes, alone):
    found = meshes[name]["norms"]
    assert ("weight_rms/decoder/layers_1/mlp/wo/kernel" in found) == (name == "scanned")
    assert found == pytest.approx(alone[single]["norms"], rel=1e-3, abs=1e-9)


@pytest.mark.processes
@pytest.mark.processes
def test_fsdp_divides_rows_of_activations_not_channels(meshes):
    program = meshes["fsdp_program"]
    moved = [line for line in program.splitlines() if MOVES.search(line)]
    assert moved
    for width in (SIZES["mlp_dim"], V):
        # Two rows on each of eight devices, not eight rows on each of two groups.
        assert f"[{B // 8},{LONG},{width}]" in program
        assert f"[{B // 2},{LONG},{width}]" not in program
        # Parameters and their gradients are moved; hidden units and logits are not.
        assert not any(f",{LONG},{width}]" in line for line in moved)


@pytest.mark.slow
def test_other_models_on_eight_devices_equal_one():
    for name, eight in eight_devices.run(__file__, "models").items():
        one = run(program_of(*OTHERS[name], preset=name))
        assert eight["initial"] == one["initial"], name
        np.testing.assert_allclose(eight["losses"], one["losses"], atol=1e-5, err_msg=name)
        assert one["losses"][0] != one["losses"][-1]


ATTENTION = "decoder/layers_0/self_attention"
PLACES = {
    "standard": {"decoder/token_embedder/embedding": ["tensor", "fsdp"],
        f"{ATTENTION}/query/kernel": ["fsdp", "tensor"],
        f"{ATTENTION}/out/kernel": ["tensor", "fsdp"],
        "decoder/layers_0/mlp/wi_0/kernel": ["fsdp", "tensor"],
        "decoder/layers_0/mlp/wo/kernel": ["tensor", "fsdp"],
        "decoder/logits_dense/kernel": ["fsdp", "tensor"], "decoder/decoder_norm/scale": ["fsdp"],
        "decoder/relpos_bias/rel_embedding": ["tensor", None]},
    # Source: mu-transformer, its X our fsdp and its Y our tensor.
    "scanned": {"decoder/token_embedder/embedding": ["tensor", "fsdp"],
        "decoder/decoder/self_attention/query/kernel": ["fsdp", None, "tensor"],
        "decoder/decoder/self_attention/out/kernel": ["tensor", None, "fsdp"],
        "decoder/decoder/mlp/wi_0/kernel": ["fsdp", None, "tensor"],
        "decoder/decoder/mlp/wo/kernel": ["tensor", None, "fsdp"],
        "decoder/decoder/pre_mlp_layer_norm/scale": ["fsdp", None]},
}  # fmt: skip
PLACES["2d"] = PLACES["standard"] | {
    "decoder/token_embedder/embedding": [None, "tensor"],
    "decoder/logits_dense/kernel": ["tensor", None],
    "decoder/decoder_norm/scale": ["tensor"],
}


@pytest.mark.processes
@pytest.mark.parametrize("name", MESHES)
def test_parameters_are_placed_by_the_rules(name, meshes):
    found = meshes[name]["params"]
    for path, place in PLACES.get(name, PLACES["standard"]).items():
        assert found[path] == place, path
    assert all(any(axis for axis in place) for place in found.values())
    # Unfactored moments, as all of this size are, are placed like their parameters.
    whole = meshes[name]["opt_state"]
    assert {path: whole[f"0/v/{path}"] for path in found} == found


@pytest.mark.processes
def test_sharding_reduces_memory_per_device(meshes, alone):
    whole = alone["plain"]["held"]
    share = {name: meshes[name]["held"] / whole for name in MESHES}
    assert share["data"] == 1
    assert share["fsdp"] < 0.4
    assert share["tensor"] < 0.4
    assert share["2d"] < 0.3
    assert "data 2 x fsdp 4 x tensor 1, 8 cpu device(s)" in meshes["fsdp"]["line"]
    assert "data 2 x fsdp 1 x tensor 4" in meshes["tensor"]["line"]


@pytest.mark.processes
def test_a_checkpoint_is_restored_on_another_mesh(meshes):
    assert meshes["restored"]["final"] == meshes["data"]["final"]
    assert meshes["restored"]["params"] == meshes["2d"]["params"]


@pytest.mark.processes
def test_microbatches_move_no_rows(meshes):
    assert "all-reduce" in meshes["microbatches"]
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert moved not in meshes["microbatches"]


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_optimizer_states_are_placed_like_parameters(optimizer):
    assert_placed(optimizer)


def assert_placed(optimizer):
    state = program_of(
        f"--optimizer.name={optimizer}", "--optimizer.learning_rate=1e-3"
    ).abstract_state()
    params = specs(state.params)
    places = specs(state.opt_state)
    found = 0
    for path, place in places.items():
        owner = next((name for name in params if path.endswith("/" + name)), None)
        if owner:
            assert place == params[owner], path
            found += 1
        else:
            assert place == [], path
    assert found >= len(params)


@pytest.mark.processes
@pytest.mark.parametrize("rules", RULES)
def test_every_model_can_be_placed(rules):
    """An axis name that a tensor has twice, or that no rule knows, would fail here."""
    mesh = make_mesh(MeshConfig())
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    for name, preset in MODEL_PRESETS.items():
        if name.endswith("_tiny") or name.startswith("tiny_"):
            spec = model_spec(preset)
            shapes = jax.eval_shape(lambda key, spec=spec: init_params(spec, key), key)
            placed = parameter_shardings(mesh, rules, shapes, logical_axes(spec))
            assert jax.tree.structure(placed) == jax.tree.structure(shapes), name


def test_rows_are_divided_over_data_and_fsdp():
    program = program_of()
    for array in put_batch(batch_of(0), program.mesh).values():
        assert array.sharding.spec == PartitionSpec(("data", "fsdp"))


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that JAX reads to lay out a mesh."""

    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5"


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("config", [MeshConfig(), MeshConfig(fsdp=8), MeshConfig(fsdp=2, tensor=8)])
def test_a_mesh_may_split_an_axis_of_the_interconnect(config, slices):
    places = [*itertools.product(range(4), repeat=3)]
    chips = [Chip(place, number) for number in range(slices) for place in places]
    mesh = make_mesh(config, chips)
    assert mesh.shape == config.sizes(len(chips))
    assert {*mesh.devices.flat} == {*chips}


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        (MeshConfig(), 8, (8, 1, 1)),
        (MeshConfig(tensor=2), 8, (4, 1, 2)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), 8, (2, 2, 2)),
        (MeshConfig(data=1), 1, (1, 1, 1)),
        (MeshConfig(tensor=3), 8, "data=-1"),
        (MeshConfig(data=2), 8, "takes 2 devices, but there are 8"),
        (MeshConfig(fsdp=-1), 8, r"--mesh.data=-1 and --mesh.fsdp=-1"),
    ],
)
def test_sizes_fit_the_devices(mesh, devices, expected):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            mesh.sizes(devices)
    else:
        assert tuple(mesh.sizes(devices).values()) == expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mesh.tensor=4"], r"--mesh.tensor=4: .*num_heads 6 is not divisible by 4"),
        (["--mesh.fsdp=3"], "emb_dim 512 is not divisible by 3"),
        (["--mesh.data=3"], r"--batch_size=128 cannot be divided among 3 parts"),
        (["--microbatches=3"], "microbatches"),
        (["--mesh.tensor=2", "--mesh.num_partitions=2"], "set one of them"),
    ],
)
def test_sizes_that_do_not_divide_are_rejected_before_devices_are_known(flags, says):
    with pytest.raises(UserError, match=says):  # noqa: PT012
        config = config_of(*flags, preset="t5_1_1_small")
        sizes, rules = config.mesh.planned(), config.mesh.rules
        check_dimensions(sizes, rules, config.model, config.phases.sizes, config.microbatches)


@pytest.mark.parametrize(
    ("processes", "parts"),
    [
        # Index of the process at each (data, tensor) position; one device each.
        ([[0, 0], [1, 1]], [(0, 2), (1, 2)]),
        ([[0, 1], [0, 1]], [(0, 1), (0, 1)]),
        ([[0, 1], [2, 3]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ([[0, 0], [0, 1]], [(0, 1), (0, 1)]),
        ([[0, 0], [1, 1], [0, 0], [1, 1]], [(0, 2), (1, 2)]),
    ],
)
def test_processes_that_share_rows_make_the_same_rows(processes, parts):
    devices = np.empty((len(processes), 1, 2), object)
    for place in np.ndindex(devices.shape):
        devices[place] = types.SimpleNamespace(process_index=processes[place[0]][place[2]])
    mesh = types.SimpleNamespace(devices=devices)
    found = [host_part(mesh, process) for process in range(len(parts))]
    assert found == [HostPart(*part) for part in parts]


def test_cudnn_without_a_gpu_is_refused():
    flags = "--model.attention=cudnn", "--model.dtype=bfloat16", "--model.dropout_rate=0"
    with pytest.raises(UserError, match="attention=cudnn needs an NVIDIA GPU"):
        program_of(*flags, preset="t5_1_1_tiny")


if __name__ == "__main__":
    main(sys.argv[1])
