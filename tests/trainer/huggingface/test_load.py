"""Folders of transformers load with bit-exact parameters, or are rejected by name."""

import itertools
import json
import os
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import serialization, traverse_util
from safetensors.numpy import load_file, save_file

from tasks.terminal.command_line import UserError
from tests.support.cases import entries, rows
from tests.support.trees import assert_equal
from tests.trainer.huggingface.conftest import random_batch
from tests.trainer.huggingface.random_shapes import GATED
from trainer.huggingface import configs, load, model_config, parity, weights


def assert_equal_trees(actual, expected):
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype("float32")}
    assert_equal(actual, expected)


NAMES = (
    "t5_1_0", "t5_1_1", "t5_1_1_tied", "mt5", "bert", "bert_untied", "llama", "llama_tied", "lm",
    "lm_untied", "llama3", "llama_linear","umt5", "umt5_tied", "t5_unscaled",
    "t5_buckets",
    *rows("LOADED"),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_round_trip_is_bit_exact(exported, name):
    model = exported(name)
    assert configs.same_model(model_config(str(model.folder)), model.config)
    # Settings that do not affect parameters may differ.
    config = replace(model.config, dropout_rate=0.1, dtype="bfloat16", scan_layers=True)
    assert_equal_trees(load(str(model.folder), config), model.params)


@pytest.mark.torch
@pytest.mark.slow
def test_shards_are_written_and_read(exported):
    model = exported("t5_1_1")
    (model.folder / "model.safetensors").unlink()
    model.write(model.written, model.tensors, shard_bytes=20_000)
    shards = sorted(model.folder.glob("model-*.safetensors"))
    assert len(shards) > 5
    index = json.loads((model.folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.tensors.values())
    assert_equal_trees(load(str(model.folder), model.config), model.params)
    assert model.parity().holds
    shards[2].write_bytes(shards[2].read_bytes()[:100])
    with pytest.raises(UserError, match=f"{shards[2].name} cannot be read"):
        load(str(model.folder), model.config)
    shards[2].unlink()
    with pytest.raises(UserError, match=f"{shards[2].name} cannot be read"):
        load(str(model.folder), model.config)


def test_weights_have_the_mode_of_other_new_files(tmp_path):
    before = os.umask(0o002)
    try:
        weights.write(str(tmp_path), {"a": np.zeros(3, np.float32)}, 10**9)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o664


def as_flax(name, tensor):
    """Returns a path and an array as the Flax models of transformers 4 store a tensor."""
    *outer, last = name.split(".")
    if last == "weight" and tensor.ndim == 2:
        is_table = any(word in name for word in ("shared", "embed", "bias", "wte", "wpe"))
        last, tensor = ("embedding", tensor) if is_table else ("kernel", tensor.T)
    elif last == "weight" and "LayerNorm" in name:
        last = "scale"
    return (*outer, last), tensor


@pytest.mark.parametrize("name", ["t5_1_1", "t5_1_0", "umt5", "bert_untied", *rows("FLAX_READ")])
def test_weights_of_flax_alone_are_read(exported, name):
    model = exported(name)
    (model.folder / "model.safetensors").unlink()
    tree = traverse_util.unflatten_dict(dict(itertools.starmap(as_flax, model.tensors.items())))
    file = model.folder / weights.FLAX
    file.write_bytes(serialization.msgpack_serialize(tree))
    assert_equal_trees(load(str(model.folder), model.config), model.params)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"flax_model.msgpack cannot be read"):
        load(str(model.folder), model.config)
    file.unlink()
    with pytest.raises(UserError, match="with transformers 4"):
        load(str(model.folder), model.config)


@pytest.mark.torch
def test_folders_of_transformers_are_read(exported):
    from transformers import T5ForConditionalGeneration

    model = exported("t5_1_1")
    folder = model.folder / "again"
    T5ForConditionalGeneration.from_pretrained(model.folder).save_pretrained(folder)
    assert_equal_trees(load(str(folder), model.config), model.params)
    model = exported("llama_tied")
    model.tensors["lm_head.weight"] = model.tensors["model.embed_tokens.weight"]
    model.write(model.written, model.tensors)
    assert_equal_trees(load(str(model.folder), model.config), model.params)


def test_half_precision_is_widened_and_copies_are_ignored(exported):
    model = exported("t5_1_0")
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in model.tensors.items()}
    shared = tensors["shared.weight"]
    tensors |= {
        "encoder.embed_tokens.weight": shared,
        "lm_head.weight": shared,
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": shared[:2],
    }
    model.write(model.written, tensors)
    found = load(str(model.folder), model.config)
    expected = jax.tree.map(
        lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), model.params
    )
    assert_equal_trees(found, expected)


def test_fields_of_another_model_are_named(exported):
    model = exported("t5_1_1")
    with pytest.raises(UserError, match="it has vocab_size 384; set these as --model"):
        load(str(model.folder), replace(model.config, vocab_size=512))
    wider = replace(model.config, mlp_dim=128, num_decoder_layers=2)
    with pytest.raises(UserError, match="it has mlp_dim 64, num_decoder_layers 1;"):
        load(str(model.folder), wider)
    tied = replace(model.config, tied_logits=True)
    with pytest.raises(UserError, match="it has tied_logits False"):
        load(str(model.folder), tied)


def renamed(tensors, name, other):
    tensors[other] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "no tensor lm_head.weight: .* tie_word_embeddings=F"),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith("decoder.")],
            "has no tensor decoder.* it is an encoder alone",
        ),
        (
            lambda t: renamed(t, "shared.weight", "share.weight"),
            r"no token embedding shared\.weight or .*weight \(did you mean share\.weight\?\)",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}),
            r"lm_head.weight gives parameter decoder/logits_dense/kernel the shape \[32, 383\], "
            r"but the model's is \[32, 384\]",
        ),
        (lambda t: t.update(adapter=np.zeros(3, np.float32)), "a tensor adapter that the model"),
        (
            lambda t: t.update({"encoder.embed_tokens.weight": t["shared.weight"] + 1}),
            "encoder.embed_tokens.weight and shared.weight differ, but the model has one table",
        ),
        (lambda t: t.pop("shared.weight"), r"embedding shared.weight or .*embed_tokens\.weight$"),
    ],
    ids=["missing", "encoder_alone", "renamed", "shape", "extra", "different_copy", "no_embedding"],
)
def test_a_wrong_tensor_is_named(exported, change, message):
    model = exported("t5_1_1")
    change(model.tensors)
    model.write(model.written, model.tensors)
    with pytest.raises(UserError, match=message):
        load(str(model.folder), model.config)


def without_beginning(tensors, beginning, heads=()):
    for name in [name for name in tensors if name.startswith(beginning)]:
        renamed(tensors, name, name.removeprefix(beginning))
    for name in heads:
        tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("t5_1_1", lambda t: renamed(t, "shared.weight", "decoder.embed_tokens.weight")),
        ("t5_1_1", lambda t: renamed(t, "shared.weight", "encoder.embed_tokens.weight")),
        ("t5_1_0", lambda t: renamed(t, "shared.weight", "lm_head.weight")),
        ("llama_tied", lambda t: renamed(t, "model.embed_tokens.weight", "lm_head.weight")),
        ("llama_tied", lambda t: without_beginning(t, "model.")),
        (
            "bert",
            lambda t: [
                renamed(t, each, f"{each.rpartition('.')[0]}.{early}")
                for each in list(t)
                for last, early in (("weight", "gamma"), ("bias", "beta"))
                if each.endswith(f"LayerNorm.{last}")
            ],
        ),
        *rows("OTHER_NAMES"),
    ],
)
def test_tensors_under_other_names_are_read(exported, name, change):
    model = exported(name)
    change(model.tensors)
    model.write(model.written, model.tensors)
    assert_equal_trees(load(str(model.folder), model.config), model.params)


@pytest.mark.torch
def test_a_kernel_beside_tied_logits_is_read_as_transformers_5_does_or_refused(tmp_path):
    """Transformers 5 keeps both, and scales; transformers 4 ignores the kernel."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(**GATED))
    made.save_pretrained(tmp_path)
    path = tmp_path / weights.WEIGHTS
    tensors = load_file(path)
    tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    tensors["lm_head.weight"] = tensors["decoder.embed_tokens.weight"][::-1].copy()
    save_file(tensors, path, metadata={"format": "pt"})
    ours = model_config(str(tmp_path))
    assert (ours.tied_logits, ours.logits_scale) == (False, 32**-0.5)
    made = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    params = load(str(tmp_path), ours)
    batch = random_batch(ours)
    found = parity.compare(parity.our_logits(ours, params), parity.their_logits(made), [batch])
    assert found.holds, str(found)
    config = tmp_path / "config.json"
    written = json.loads(config.read_text())
    del written["scale_decoder_outputs"]
    config.write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"lm_head.weight and decoder.* differ.*to false"):
        load(str(tmp_path), model_config(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5_1_1", {"model_type": "bart"}, "model_type is bart, not one of bert, "),
        ("t5_1_1", {"d_ff": None}, "has no field d_ff"),
        ("t5_1_1", {"d_ff": "64"}, "d_ff is '64': write numbers without quotes"),
        ("umt5", {"num_memory_tokens": 10}, "num_memory_tokens is 10: this field is unknown"),
        ("t5_1_1", {"relative_attention_num_buckets": 6},
         "num_buckets=6.*num_buckets is a multiple"),
        ("t5_1_1", {"feed_forward_proj": "gated-swish"}, "feed_forward_proj is gated-swish, not"),
        ("t5_1_1", {"dense_act_fn": "relu"}, "dense_act_fn is relu; our models have gelu_new"),
        ("t5_1_1", {"is_gated_act": False}, "is_gated_act is False; our models have True"),
        ("t5_1_1", {"num_heads": 0}, "num_heads is 0"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads is 3; it must be a divisor of num_h"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "of kind dynamic, not"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "of kind yarn have no factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "of kind linear have no factor"),
        ("bert", {"is_decoder": True}, "is_decoder is True; our models have False"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is rel"),
        ("t5_1_1", {"layer_drop": 0.1}, "layer_drop is 0.1: this field is unknown here and may"),
        ("t5_1_1", {"tie_encoder_decoder": True}, "tie_encoder_decoder is True; our"),
        ("llama", {"final_logit_softcapping": 30.0, "sliding_window": 4096, "a": 1, "b": 2},
         "final_logit_softcapping is 30.0, sliding_window is 4096, a is 1 and 1 more: these"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("llama", {"partial_rotary_factor": 0.5}, "with partial_rotary_factor 0.5"),
        ("llama", {"rope_scaling": {"mscale": 2.0}}, "with mscale 2.0, which our"),
        ("t5_1_1", {"auto_map": {"AutoModel": "mine.Mine"}}, "auto_map is {'AutoModel'"),
        *rows("UNSUPPORTED_FIELDS"),
    ],
)  # fmt: skip
def test_the_field_of_an_unsupported_model_is_named(exported, name, changes, message):
    model = exported(name)
    model.write({**model.written, **changes}, {})
    with pytest.raises(UserError, match=message):
        model_config(str(model.folder))


def test_missing_folders_and_weights_are_named(tmp_path, exported):
    with pytest.raises(UserError, match="is not a transformers model folder"):
        model_config(str(tmp_path / "nowhere"))
    model = exported("t5_1_1")
    (model.folder / weights.WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        load(str(model.folder), model.config)


def test_a_bert_without_its_second_head_gets_one(exported, capsys):
    """Writes a folder as BertForMaskedLM saves it."""
    model = exported("bert")
    without = ("cls.seq_relationship", "bert.pooler")
    tensors = {n: t for n, t in model.tensors.items() if not n.startswith(without)}
    model.write(model.written, tensors)
    found = load(str(model.folder), model.config)
    assert "has no bert.pooler.dense, cls.seq_relationship" in capsys.readouterr().err
    drawn = found.pop("order_head")
    expected = dict(model.params)
    head = expected.pop("order_head")
    assert_equal_trees(found, expected)
    assert jax.tree.map(np.shape, drawn) == jax.tree.map(np.shape, head)
    # The family's distribution, by a fixed key.
    assert np.std(drawn["pooler"]["kernel"]) == pytest.approx(0.0176, rel=0.2)
    assert not drawn["pooler"]["bias"].any()
    assert_equal_trees(load(str(model.folder), model.config)["order_head"], drawn)
    # A part of it is kept.
    model.write(
        model.written, {**tensors, **{n: model.tensors[n] for n in model.tensors if "pooler" in n}}
    )
    kept = load(str(model.folder), model.config)["order_head"]
    assert_equal_trees(kept["pooler"], head["pooler"])
    assert_equal_trees(kept["logits"], drawn["logits"])


@pytest.mark.torch
@pytest.mark.parametrize(
    "kind", ["T5", "MT5", "UMT5", "Llama", "Gemma", "GPT2", "Bert", "Roberta", "ModernBert"]
)
def test_default_configurations_are_read(kind, tmp_path):
    import transformers

    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    model_config(str(tmp_path))


# Fields of folders on the Hub, saved by transformers 2 to 4.
ON_THE_HUB = {
    "t5_1_0": {"n_positions": 512, "output_past": True,
        "task_specific_params": {"summarization": {"num_beams": 4, "prefix": "summarize: "}},
        "torch_dtype": "float32"},
    "umt5": {"scalable_attention": True, "tokenizer_class": "T5Tokenizer", "max_new_tokens": 64},
    "llama": {"_name_or_path": "x", "max_sequence_length": 2048, "pretraining_tp": 1,
        "rope_interleaved": False, "is_llama_config": True,
        "transformers.js_config": {"dtype": "q4"}},
    "bert": {"directionality": "bidi", "pooler_type": "first_token_transform", "pruned_heads": {}},
    **entries("FIELDS_ON_THE_HUB"),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_fields_without_effect_are_known(exported, name):
    model = exported(name)
    before = model_config(str(model.folder))
    model.write({**model.written, **ON_THE_HUB[name]}, {})
    assert model_config(str(model.folder)) == before


def test_fields_that_transformers_fills_in(exported):
    """Missing fields have the values that transformers gives them."""
    llama = exported("llama3")
    rope = {**llama.written["rope_scaling"], "original_max_position_embeddings": None}
    llama.write({**llama.written, "rope_scaling": rope}, llama.tensors)
    assert "original_positions=64" in model_config(str(llama.folder)).position
