"""ModernBERT: an encoder with rotary positions, windows, and norms before sublayers.

Source: transformers 5.23, modeling_modernbert.py, and 4.57 for the bases of rotary positions;
ModernBERT (arXiv:2412.13663), section 2.
"""

from typing import Any

from trainer.annexes.layer_types import layer_types
from trainer.huggingface import formats, module_names, rotary
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import Kind
from trainer.huggingface.module_names import activations
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec

# transformers' defaults.
_EVERY, _WINDOW = 3, 128
_GLOBAL_BASE, _LOCAL_BASE = 160_000.0, 10_000.0
_SIZES = {name: ours for name, ours in formats.BERT.items() if ours != "max_positions"}


def _read(fields: Fields) -> ModelConfig:
    activation = fields.named("hidden_activation", formats.ACTIVATIONS, "gelu")
    head = fields.named("classifier_activation", formats.ACTIVATIONS, "gelu")
    if head != activation:
        raise ValueError("classifier_activation is not hidden_activation, as in our models")
    for name, expected in (("decoder_bias", True), ("rope_scaling", None)):
        fields.require(name, expected)
    types = [
        layer_types.SLIDING
        if number % fields.size("global_attn_every_n_layers", _EVERY)
        else layer_types.FULL
        for number in range(fields.size("num_hidden_layers"))
    ]
    # transformers 4 has two fields for the bases; null means the global one.
    of_global, of_local = layer_types.ropes(fields)
    base = fields.number("global_rope_theta", _GLOBAL_BASE)
    local = fields.nullable("local_rope_theta", _LOCAL_BASE)
    local = layer_types.local_base(of_local, base if local is None else local)
    bias = fields.get("norm_bias", False)
    return ModelConfig(
        family="bert_pre_ln",
        **fields.sizes(_SIZES),
        head_dim=fields.size("hidden_size") // fields.size("num_attention_heads"),
        num_decoder_layers=0,
        dropout_rate=fields.get("embedding_dropout", 0.0),
        tied_logits=fields.get("tie_word_embeddings", True),
        mlp_activations=(activation, "linear"),
        position=rotary.of(of_global, fields, base, per_type=True, fraction=1.0),
        attention_window=layer_types.read(
            fields, fields.get("local_attention", _WINDOW), types, base=local
        ),
        norm=formats.norm_of("layer_norm", fields.get("norm_eps", 1e-5), bias=bias),
        norm_placement="pre_but_first",
        token_types=0,
        mlp_bias=fields.get("mlp_bias", False),
        attention_bias=fields.get("attention_bias", False),
        head_bias=fields.get("classifier_bias", False),
    )


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    if config.emb_dim % config.num_heads:
        raise KeyError("num_heads")  # transformers refuses such a ModernBERT
    kinds, window = activations(config), layer_types.window_of(config)
    if kinds[1:] != ("linear",):
        raise KeyError(config.mlp_activations)
    rope = rotary.written(config)
    local = rope["rope_theta"] if window is None or window.base is None else window.base
    return {
        "architectures": ["ModernBertForMaskedLM"],
        **formats.sizes(config, _SIZES),
        "hidden_activation": formats.ACTIVATIONS[kinds[0]],
        "classifier_activation": formats.ACTIVATIONS[kinds[0]],
        "max_position_embeddings": positions,
        "embedding_dropout": config.dropout_rate,
        "attention_dropout": config.dropout_rate,
        "norm_eps": formats.epsilon_of(config),
        "norm_bias": model_spec(config).stacks["encoder"].layers[0].norm.has_bias,
        "mlp_bias": bool(config.value("mlp_bias")),
        "attention_bias": bool(config.value("attention_bias")),
        "classifier_bias": config.head_bias,
        "local_attention": window.window if window else _WINDOW,
        "layer_types": layer_types.written(config),
        # transformers 4 reads these instead of the next two.
        **_every(layer_types.written(config)),
        "global_rope_theta": rope["rope_theta"],
        "local_rope_theta": local,
        "rope_parameters": {
            layer_types.FULL: rope,
            layer_types.SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _every(types: list[str]) -> dict[str, int]:
    """Returns how many layers apart global ones are; {} if transformers 4 has no such model."""
    for every in range(1, len(types) + 1):
        if all((kind == layer_types.FULL) == (at % every == 0) for at, kind in enumerate(types)):
            return {"global_attn_every_n_layers": every}
    return {}


def _tensors(config: ModelConfig) -> dict[str, str]:
    layer = model_spec(config).stacks["encoder"].layers[0]
    norm_bias, bias = layer.norm.has_bias, config.value("attention_bias")
    inside = module_names.affine("attention/out", "attn.Wo", bias)
    for name in ("query", "key", "value"):
        inside |= module_names.affine(f"attention/{name}", "attn.Wqkv", bias)
    for ours, theirs in (("wi_0", "Wi"), ("wi_1", "Wi"), ("wo", "Wo")):
        inside |= module_names.affine(f"mlp/{ours}", f"mlp.{theirs}", layer.feed_forward.bias)
    inside |= module_names.affine("pre_attention_layer_norm", "attn_norm", norm_bias)
    inside |= module_names.affine("pre_mlp_layer_norm", "mlp_norm", norm_bias)
    layers = module_names.layers("encoder", config.num_encoder_layers, "model.layers", inside)
    first = "encoder/layers_0/pre_attention_layer_norm/"
    return {
        "token_embedder/embedding": "model.embeddings.tok_embeddings",
        **module_names.affine("encoder/embedding_layer_norm", "model.embeddings.norm", norm_bias),
        **{path: name for path, name in layers.items() if not path.startswith(first)},
        **module_names.affine("encoder/encoder_norm", "model.final_norm", norm_bias),
        **module_names.affine("mlm_head/dense", "head.dense", config.head_bias),
        **module_names.affine("mlm_head/layer_norm", "head.norm", norm_bias),
        "mlm_head/logits_bias": "decoder",
    }


# Dropout, initial values, other heads, and fields that ModernBertConfig ignores.
_INERT = frozenset(
    {
        *("embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "classifier_pooling"),
        *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
        *("sparse_prediction", "sparse_pred_ignore_index"),
        *("layer_norm_eps", "position_embedding_type", "is_decoder"),
    }
)
MODERNBERT = Kind(
    *(_read, _write, _tensors, ("bert_pre_ln",), "model.", _INERT),
    kernel=("mlm_head/logits_dense/kernel", "decoder"),
    compared=("ModernBertForMaskedLM",),
    joined={"Wqkv": module_names.PROJECTIONS, "Wi": ("wi_0", "wi_1")},
    embeddings=("model.embeddings.tok_embeddings.weight",),
    heads=("head.", "decoder."),
    missing={
        "head.dense.": "an encoder alone, as saved by ModernBertModel; name a folder saved by "
        "ModernBertForMaskedLM"
    },
)
