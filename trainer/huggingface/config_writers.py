"""Writes a model's config.json of transformers, for each model_type.

A writer raises KeyError if its type cannot express the model; `configs.model_type` compares the
rest with what is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tasks.vocabulary import PAD_ID
from trainer.huggingface.names import activations, decoder_layer, logits_are_tied
from trainer.model import parts
from trainer.model.capabilities import TRANSFORMERS
from trainer.model.config import ModelConfig

# The model_type of modeling_palimpsest.py.
CUSTOM = "palimpsest"
# Fixed in our modelling file; a folder with other values holds another model.
OUR_BUCKETS, OUR_DISTANCE = 32, 128

# Our activations -> transformers' names.
ACTIVATIONS = MappingProxyType(
    {
        "gelu": "gelu_new",
        "gelu_erf": "gelu",
        "relu": "relu",
        "silu": "silu",
        "squared_relu": "relu2",
    }
)
T5_PROJECTIONS = MappingProxyType(
    {
        ("relu",): "relu",
        ("gelu",): "gelu_new",
        ("gelu_erf",): "gelu",
        ("silu",): "silu",
        ("squared_relu",): "relu2",
        ("gelu", "linear"): "gated-gelu",
        ("silu", "linear"): "gated-silu",
        ("relu", "linear"): "gated-relu",
    }
)


def _epsilon(config: ModelConfig) -> float:
    norm = config.part("norm")
    if not hasattr(norm.options, "epsilon"):
        raise KeyError(norm.name)
    return float(norm.options.epsilon)


def _to_t5(config: ModelConfig, positions: int) -> dict[str, Any]:
    relative = config.part("position").options
    if not isinstance(relative, parts.Relative):
        raise KeyError(config.position)
    tied = logits_are_tied(config)
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_model": config.emb_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": T5_PROJECTIONS[activations(config)],
        "relative_attention_num_buckets": relative.num_buckets,
        "relative_attention_max_distance": relative.max_distance,
        "layer_norm_epsilon": _epsilon(config),
        "dropout_rate": config.dropout_rate,
        "decoder_start_token_id": PAD_ID,
        # Without this field, transformers scales tied logits.
        "scale_decoder_outputs": tied and config.logits_scale is None,
    }


def _to_umt5(config: ModelConfig, positions: int) -> dict[str, Any]:
    if logits_are_tied(config) and config.logits_scale is not None:
        raise KeyError("logits_scale")
    written = _to_t5(config, positions)
    return {**written, "architectures": ["UMT5ForConditionalGeneration"]}


def _to_decoder(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_decoder_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_dim,
        "hidden_act": ACTIVATIONS[activations(config)[0]],
        "rms_norm_eps": _epsilon(config),
        # Rows begin with id 0 in training.
        "bos_token_id": PAD_ID,
    }


def _to_llama(config: ModelConfig, positions: int) -> dict[str, Any]:
    rotary = config.part("position").options
    if not isinstance(rotary, parts.Rotary):
        raise KeyError(config.position)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.scaling != "none":
        rope |= {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling == "llama3":
        rope |= {
            "low_freq_factor": rotary.low_frequency,
            "high_freq_factor": rotary.high_frequency,
            "original_max_position_embeddings": rotary.original_positions,
        }
    if config.emb_dim % config.num_heads:
        raise KeyError("num_heads")  # transformers refuses such a Llama
    return {
        "architectures": ["LlamaForCausalLM"],
        **_to_decoder(config, positions),
        "max_position_embeddings": positions,
        "rope_parameters": rope,
        "attention_bias": bool(config.value("attention_bias")),
        "mlp_bias": bool(config.value("mlp_bias")),
    }


def _to_gemma(config: ModelConfig, positions: int) -> dict[str, Any]:
    written = _to_llama(config, positions) | {"architectures": ["GemmaForCausalLM"]}
    # Gemma has no such field, and calls its activation by torch's name.
    del written["mlp_bias"]
    return {**written, "hidden_act": "gelu_pytorch_tanh"}


def _to_gpt2(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": config.emb_dim,
        "n_inner": config.mlp_dim,
        "n_layer": config.num_decoder_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_positions,
        "activation_function": ACTIVATIONS[activations(config)[0]],
        "layer_norm_epsilon": _epsilon(config),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout_rate),
        # Rows begin with id 0 in training.
        "bos_token_id": PAD_ID,
    }


def _to_custom(config: ModelConfig, positions: int) -> dict[str, Any]:
    if TRANSFORMERS not in config.mixer_facts.exports:
        raise KeyError(config.mixer)
    module = f"modeling_{CUSTOM}"
    layer = decoder_layer(config)
    return {
        "architectures": ["PalimpsestForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.PalimpsestConfig",
            "AutoModelForCausalLM": f"{module}.PalimpsestForCausalLM",
        },
        **_to_decoder(config, positions),
        "family": config.family,
        "gated_mlp": len(activations(config)) == 2,
        "mixer": config.part("mixer").name,
        "norm": config.part("norm").name,
        "norm_placement": config.value("norm_placement"),
        "mlp_bias": layer.feed_forward.bias,
        "relative_attention_num_buckets": OUR_BUCKETS,
        "relative_attention_max_distance": OUR_DISTANCE,
    }


def _to_bert(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        # The weights include both heads; BertForMaskedLM loads only its own.
        "architectures": ["BertForPreTraining"],
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_encoder_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": ACTIVATIONS[activations(config)[0]],
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.dropout_rate,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": 2,
        "layer_norm_eps": _epsilon(config),
    }


WRITERS: Mapping[str, Callable[[ModelConfig, int], dict[str, Any]]] = MappingProxyType(
    {
        "t5": _to_t5,
        "umt5": _to_umt5,
        "llama": _to_llama,
        "gemma": _to_gemma,
        "gpt2": _to_gpt2,
        CUSTOM: _to_custom,
        "bert": _to_bert,
    }
)
