"""Folders of t5-experiments: its fields are read or refused by name, its tensors loaded."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.terminal.command_line import UserError
from trainer.config.presets import model_preset
from trainer.huggingface import configs, load, model_config
from trainer.model.paths import named

pytestmark = pytest.mark.torch

D, H, K, F, V = 12, 4, 6, 16, 40
T5 = {
    **{"model_type": "t5", "d_ff": F, "d_kv": K, "d_model": D, "num_heads": H, "num_layers": 2},
    **{"vocab_size": V, "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6},
    "relative_attention_num_buckets": 32,
}
CDQ_LAYER = "modeling_t5:T5CDQAttention"
CDQ = {
    "encoder_self_attention_layer": CDQ_LAYER,
    "decoder_self_attention_layer": "modeling_t5:T5Attention",
    "decoder_cross_attention_layer": "modeling_t5:T5Attention",
}
BERT = {
    **{"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "hidden_act": "gelu"},
    **{"num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": V, "type_vocab_size": 2},
    **{"layer_norm_eps": 1e-12, "max_position_embeddings": 24},
}
RELATIVE = {
    "position_embedding_type": "relative_attention_bias",
    "relative_attention_num_buckets": 32,
    "relative_last_bucket_distance": 128,
}
ROTARY = {"position_embedding_type": "rotary", "rotary_base": 10_000, "rotary_dim": 4}


def folder_of(tmp_path, written, shapes):
    """Returns a folder with random tensors, and the tensors."""
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(written))
    return str(tmp_path), tensors


def t5_shapes(conditional):
    """Returns the shapes of such a T5's tensors: those of transformers, with other attentions."""
    from transformers import T5Config, T5ForConditionalGeneration

    made = T5ForConditionalGeneration(T5Config(**T5, feed_forward_proj="relu"))
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    for name in list(shapes):
        if "embed_tokens" in name or name == "lm_head.weight":  # the shared table
            del shapes[name]
    if not conditional:
        return shapes
    for name, (rows, *columns) in list(shapes.items()):
        if name.startswith("encoder") and "relative" in name:
            shapes[name] = (rows, conditional)
        if name.startswith("encoder") and name.endswith(("q.weight", "k.weight", "v.weight")):
            shapes[name] = (conditional * K, *columns)
    for index in range(2):
        own = f"encoder.block.{index}.layer.0.SelfAttention"
        if conditional == H:
            del shapes[f"{own}.q.weight"]
        shapes |= {f"{own}.cd_q.weight": (K, D), f"{own}.cd_w.weight": (D, 2 * D)}
        shapes |= {f"{own}.T.weight": (conditional, D), f"{own}.W_t.weight": (D, D)}
    return shapes


@pytest.mark.parametrize("conditional", [0, 2, 4])
@pytest.mark.parametrize("memory", [None, "memory_tokens", "encoder.memory_tokens"])
def test_t5_with_conditional_queries_and_memory_tokens(tmp_path, conditional, memory):
    written = dict(T5)
    if conditional:
        written |= {**CDQ, "num_cdq_heads": conditional}
    shapes = t5_shapes(conditional)
    if memory:
        written["num_memory_tokens"] = 3
        shapes[memory] = (3, D)
    folder, tensors = folder_of(tmp_path, written, shapes)
    config = model_config(folder)
    expected = {0: "attention", 2: "cdq:conditional_heads=2", 4: "cdq"}[conditional]
    assert str(config.part("mixer")) == expected
    assert config.stack_parts == ("memory_tokens:count=3" if memory else "none")
    params = named(load(folder, config))
    assert sum(leaf.size for leaf in params.values()) == sum(t.size for t in tensors.values())
    block = "encoder.block.1.layer.0.SelfAttention"
    names = {"key": "k", "value": "v", "out": "o"}
    if conditional:
        names |= {"pool": "T", "pool_hidden": "W_t", "condition": "cd_w"}
        names |= {"conditional_query": "cd_q"}
    if conditional < H:
        names |= {"query": "q"}
    for ours, theirs in names.items():
        kernel = params[f"encoder/layers_1/attention/{ours}/kernel"]
        np.testing.assert_array_equal(kernel, tensors[f"{block}.{theirs}.weight"].T)
    if memory:
        np.testing.assert_array_equal(params["memory_embedder/embedding"], tensors[memory])
    # Plain T5 is the only one that transformers computes.
    assert (configs.refusal(config) is None) == (not conditional and not memory)


def bert_shapes(pre, position):
    """Returns the shapes of such a BERT's tensors: transformers', with other norms and tables."""
    from transformers import BertConfig, BertForPreTraining

    made = BertForPreTraining(BertConfig(**BERT))
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    for name in list(shapes):
        if "cls.predictions.decoder" in name:  # the table of tokens
            del shapes[name]
        if pre and name.startswith("bert.encoder") and ".output.LayerNorm" in name:
            other = "post_attention_ln" if "attention.output" in name else "pre_attention_ln"
            place = name.split(".attention.output" if "attention.output" in name else ".output")[0]
            shapes[f"{place}.{other}.{name.rpartition('.')[2]}"] = shapes.pop(name)
    if pre:
        last = "bert.encoder.last_layer_ln"
        shapes |= {f"{last}.weight": (16,), f"{last}.bias": (16,)}
    if position != "absolute":
        del shapes["bert.embeddings.position_embeddings.weight"]
    own = "bert.encoder.layer.{}.attention.self"
    if position == "relative":
        shapes[f"{own.format(0)}.relative_attention_bias.weight"] = (32, 2)
    if position == "rotary":
        shapes |= {f"{own.format(index)}.rotary_emb.inv_freq": (2,) for index in range(2)}
    return shapes


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("position", ["absolute", "relative", "rotary"])
def test_bert_with_other_norms_and_positions(tmp_path, capsys, pre, position):
    written = BERT | {"absolute": {}, "relative": RELATIVE, "rotary": ROTARY}[position]
    if pre:
        written |= {"pre_layer_norm": True, "last_layer_norm": True}
    folder, tensors = folder_of(tmp_path, written, bert_shapes(pre, position))
    config = model_config(folder)
    assert config.family == ("bert_pre_ln" if pre else "bert")
    assert config.position_scheme == position
    if position == "rotary":
        assert config.rotated_channels == 4
    params = named(load(folder, config))
    layer, norm = "bert.encoder.layer.1", "post_attention_layer_norm"
    theirs = f"{layer}.attention.output.LayerNorm"
    if pre:
        norm, theirs = "pre_mlp_layer_norm", f"{layer}.post_attention_ln"
        np.testing.assert_array_equal(
            params["encoder/encoder_norm/scale"], tensors["bert.encoder.last_layer_ln.weight"]
        )
    found = params[f"encoder/layers_1/{norm}/scale"]
    np.testing.assert_array_equal(found, tensors[f"{theirs}.weight"])
    if position == "relative":
        table = tensors["bert.encoder.layer.0.attention.self.relative_attention_bias.weight"]
        np.testing.assert_array_equal(params["encoder/relpos_bias/rel_embedding"], table.T)
    assert ("trained without positions" in capsys.readouterr().err) == (position == "relative")
    assert (configs.refusal(config) is None) == (not pre and position == "absolute")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (T5 | CDQ, "has no field num_cdq_heads"),
        (T5 | CDQ | {"num_cdq_heads": 3}, "conditional_heads are num_heads, 4, or half"),
        (T5 | {"decoder_self_attention_layer": CDQ_LAYER}, "decoder_self_attention_layer is mod"),
        (T5 | {"decoder_cross_attention_layer": "mine:Attention"}, "decoder_cross_.* is mine:Att"),
        (T5 | {"encoder_self_attention_layer": "mine:Attention"}, "encoder_.* not one of modelin"),
        (BERT | {"position_embedding_type": "relative_key"}, "embedding_type is relative_key"),
        (BERT | RELATIVE | {"relative_last_bucket_distance": None}, "relative_last_bucket_dist"),
        (BERT | {"pre_layer_norm": True, "last_layer_norm": False}, "last_layer_norm is False"),
        (BERT | {"sparse_attention": {"block": 16}}, "sparse_attention is"),
        (BERT | {"sparse_config_cls": "deepspeed:BigBird"}, "sparse_config_cls is deepspeed"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(tmp_path, written, message):
    folder, _ = folder_of(tmp_path, written, {})
    with pytest.raises(UserError, match=message):
        model_config(folder)


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("t5_1_0_base_cdq", CDQ | {"num_cdq_heads": 6}),
        ("t5_1_0_base_only_cdq", CDQ | {"num_cdq_heads": 12}),
    ],
)
def test_presets_are_their_models(tmp_path, preset, fields):
    sizes = {"d_ff": 3072, "d_kv": 64, "d_model": 768, "num_heads": 12, "num_layers": 12}
    folder, _ = folder_of(tmp_path, T5 | sizes | {"vocab_size": 32_128} | fields, {})
    assert configs.same_model(model_config(folder), model_preset(preset))
