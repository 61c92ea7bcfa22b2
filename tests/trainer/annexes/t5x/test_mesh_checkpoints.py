"""Tests that checkpoints of Mesh TensorFlow, written by TensorFlow, are read bit for bit."""

import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from trainer.annexes.t5x import mesh
from trainer.checkpoints import layout, stored
from trainer.config.presets import model_preset
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

STEP = 524_288
# The names that the older and the newer releases give to norms, in layers and at the end.
LEGACY, NEW = ("layer_norm", "final_layer_norm"), ("rms_norm", "rms_norm")


# In a process of its own: a test of transformers has torch in this one.
SAVE = """
import pickle, sys
import tensorflow as tf
prefix, shards, variables = pickle.load(sys.stdin.buffer)
parts = [f"{prefix}_temp_{number}/part" for number in range(shards)]
names = sorted(variables)
for number, part in enumerate(parts):
    own = names[number::shards]
    tf.raw_ops.SaveV2(prefix=part, tensor_names=own, shape_and_slices=[""] * len(own),
                      tensors=[tf.constant(variables[name]) for name in own])
tf.raw_ops.MergeV2Checkpoints(
    checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=True)
"""


def save(folder, variables, shards=1):
    """Writes model.ckpt-STEP with TensorFlow, in `shards` data files; returns its prefix."""
    folder.mkdir(exist_ok=True)
    prefix = f"{folder}/model.ckpt-{STEP}"
    wanted = pickle.dumps((prefix, shards, variables))
    subprocess.run([sys.executable, "-c", SAVE], input=wanted, check=True)
    return prefix


def under_mesh_names(model, norms=LEGACY):
    """Returns the parameters of a T5 of transformers under Mesh's names."""
    found = {"global_step": np.int64(STEP)}
    for name, tensor in model.state_dict().items():
        array, path = tensor.numpy(), name.split(".")[:-1]
        if name.endswith("embed_tokens.weight"):
            continue
        if name == "lm_head.weight" and model.lm_head.weight is model.shared.weight:
            continue
        if path == ["shared"]:
            found["shared/embedding"] = array
        elif path == ["lm_head"]:
            found["decoder/logits/kernel"] = array.T
        elif path[1] == "final_layer_norm":
            found[f"{path[0]}/{norms[1]}/scale"] = array
        else:
            stack, _, block, _, layer, *rest = path
            place = f"{stack}/block_{int(block):03d}/layer_{int(layer):03d}"
            if rest == ["layer_norm"]:
                found[f"{place}/{norms[0]}/scale"] = array
            elif rest[0] == "DenseReluDense":
                found[f"{place}/{'/'.join(rest)}/kernel"] = array.T
            else:
                found[f"{place}/{'/'.join(rest)}"] = array.T
    return found


@pytest.mark.tensorflow
def test_every_byte_and_the_moments_are_read(tmp_path):
    random = np.random.default_rng(0)
    theirs, table = "encoder/block_000/layer_000/SelfAttention/q", "shared/embedding"
    shapes = {table: (384, 128), f"{table}_slot_vr": 128, f"{table}_slot_vc": 384}
    shapes |= {theirs: (128, 128), f"{theirs}_slot_vr": 128, f"{theirs}_slot_vc": 128}
    norm = "encoder/final_layer_norm/scale"
    shapes |= {norm: 128, f"{norm}_slot_v": 128, "decoder/logits/kernel/adam_m": (2, 2)}
    variables = {name: random.random(shape).astype("f4") for name, shape in shapes.items()}
    variables[theirs] = variables[theirs].astype(ml_dtypes.bfloat16)
    variables["global_step"] = np.int64(STEP)
    prefix = save(tmp_path / "mesh", variables)
    checkpoint = stored.load(str(tmp_path / "mesh"))
    assert checkpoint.path == prefix == stored.find(f"{prefix}.index")
    assert checkpoint.step == STEP
    query = "encoder/layers_0/attention/query/kernel"
    names = {"token_embedder/embedding": table, query: theirs, "encoder/encoder_norm/scale": norm}
    expected = {ours: variables[name] for ours, name in names.items()}
    assert checkpoint.parameters.keys() == expected.keys()
    for name, array in expected.items():
        tensor = checkpoint.parameters[name]
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(tensor.whole(), array)
    part = checkpoint.parameters["token_embedder/embedding"].read((slice(3, 5), slice(1)))
    np.testing.assert_array_equal(part, variables[table][3:5, :1])
    parts = layout.read_parts(checkpoint)
    # Mesh averages row moments over the larger axis, and over the first of two equal ones.
    for name, variable in (("token_embedder/embedding", table), (query, theirs)):
        for over, slot in (("over 0", "vr"), ("over 1", "vc")):
            moments = variables[f"{variable}_slot_{slot}"]
            np.testing.assert_array_equal(parts[name][over].whole(), moments)
    assert set(parts["encoder/encoder_norm/scale"]) == {"value", "v"}


ATTENTION = {name: (16, 16) for name in ("q", "k", "v", "o")}
TAPS = ("conv_0", "conv_1", "conv_2")
MDHA = {f"{name}_dconv/{tap}": (16,) for name in "qkv" for tap in TAPS}
SHARED = {
    **{name: (16, 16) for name in ("q", "v", "o", "q_solo_project/kernel")},
    **{f"{name}_dconv/{tap}": (16,) for name in ("qk", "v") for tap in TAPS},
}
FEED_FORWARD = {
    **{"DenseReluDense/wi/kernel": (16, 32), "DenseReluDense/wi/bias": (32,)},
    **{"DenseReluDense/wo/kernel": (32, 16), "DenseReluDense/wo/bias": (16,)},
}
LAYER_NORM = "true_layer_norm/layer_prepostprocess/layer_norm/layer_norm_"
PRIMER_NORM = "primer_norm/layer_prepostprocess/primer_norm/primer_norm_"


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("preset", "mixer", "inside", "norm"),
    [
        ("tiny_transformer_vanilla", "SelfAttention", ATTENTION, LAYER_NORM),
        ("tiny_primer_ez", "MDHA", ATTENTION | MDHA, LAYER_NORM),
        ("tiny_primer_as_released", "MDHA", SHARED, PRIMER_NORM),
    ],
)
def test_the_language_models_of_primer_have_our_parameters(preset, mixer, inside, norm, tmp_path):
    shapes = {"transformer/embedding": (32_128, 16)}
    norms = {f"{norm}{part}": (16,) for part in ("scale", "bias")}
    shapes |= {f"transformer/{name}": shape for name, shape in norms.items()}
    for block in range(2):
        mixing = {f"{mixer}/{name}": shape for name, shape in inside.items()}
        for layer, variables in enumerate((mixing, FEED_FORWARD)):
            place = f"transformer/block_{block:03d}/layer_{layer:03d}"
            shapes |= {f"{place}/{name}": shape for name, shape in (variables | norms).items()}
    shapes[f"transformer/block_000/layer_000/{mixer}/relative_attention_bias"] = (2, 32)
    prefix = save(tmp_path, {name: np.zeros(shape, "f4") for name, shape in shapes.items()})
    found = {name: tensor.shape for name, tensor in mesh.load(prefix).parameters.items()}
    facts = parameter_facts(model_spec(model_preset(preset)))
    assert found == {name: each.shape for name, each in facts.items()}


@pytest.mark.tensorflow
def test_damage_and_foreign_variables_are_named(tmp_path):
    one = {"shared/embedding": np.arange(8, dtype="f4").reshape(4, 2)}
    prefix = save(tmp_path / "a", {**one, "decoder/experts/wi": np.zeros(3, "f4")})
    with pytest.raises(UserError, match="no counterpart for the variable decoder/experts/wi"):
        stored.load(prefix)
    prefix = save(tmp_path / "b", one)
    data = tmp_path / "b" / f"model.ckpt-{STEP}.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    tensor = stored.load(prefix).parameters["token_embedder/embedding"]
    with pytest.raises(UserError, match=r"shared/embedding in .* is damaged"):
        tensor.whole()
    index = tmp_path / "b" / f"model.ckpt-{STEP}.index"
    whole = index.read_bytes()
    for damaged in (whole[:20], whole[:10] + b"?" + whole[11:]):
        index.write_bytes(damaged)
        with pytest.raises(UserError, match="is not the index of a TensorFlow checkpoint"):
            stored.load(prefix)
