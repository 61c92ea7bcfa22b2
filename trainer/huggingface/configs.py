"""Conversion of model configurations to transformers' config.json and back.

Models without a counterpart in transformers are refused with the reason. For the decoder-only
families "lm" and "primer" there is a modelling file of our own, which a folder can include.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, PAD_ID
from trainer.huggingface.names import activations, decoder_layer, logits_are_tied
from trainer.model.config import ModelConfig
from trainer.model.facts import TRANSFORMERS
from trainer.model.spec import NORMS, model_spec

# The model_type of modeling_palimpsest.py.
CUSTOM = "palimpsest"
# The families that it supports.
OF_CUSTOM_CODE = ("lm", "primer")

# Our activations by transformers' names.
_ACTIVATIONS = MappingProxyType(
    {
        "gelu": "gelu_new",
        "gelu_erf": "gelu",
        "relu": "relu",
        "silu": "silu",
        "squared_relu": "relu2",
    }
)
_T5_PROJECTIONS = MappingProxyType(
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
# Values of our models; a folder with others holds another model.
_EPSILON = {"t5": 1e-6, "bert": 1e-12}
_BUCKETS, _DISTANCE = 32, 128
_ROTARY_BASE = 10_000.0


def refusal(config: ModelConfig, custom_code: bool = False) -> str | None:
    """Returns why transformers has no model like this, or None if it has one."""
    if config.family in OF_CUSTOM_CODE and not custom_code and refusal(config, True) is None:
        return (
            f"family {config.family} has no counterpart in transformers; --custom_code writes a "
            "modelling file for it"
        )
    if config.family == "bert_pre_ln":
        return "BertForMaskedLM has its norms after the sublayers, family bert_pre_ln before them"
    if config.family not in _WRITERS:
        return f"transformers has no model of family {config.family}"
    if config.family == "bert" and config.position not in (None, "absolute"):
        return f"BertForMaskedLM has learned positions, this model has {config.position} ones"
    if config.family in ("llama", "bert") and config.emb_dim % config.num_heads:
        return f"emb_dim {config.emb_dim} does not divide by {config.num_heads} heads"
    found = _plain(config)
    with contextlib.suppress(KeyError, UserError):
        found = from_config(to_config(config, positions=1), "config.json")
    if not same_model(found, config):
        # Activations, sizes of heads, or any other change of the family.
        changed = ", ".join(different_fields(found, config))
        return f"transformers has no {config.family} model with {changed or 'these layers'}"
    return None


def same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Returns whether two configurations are the same function of parameters and batch."""
    return model_spec(_inference(one)) == model_spec(_inference(other))


def different_fields(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Returns the fields in which models differ, as "emb_dim 512" with the value of `other`."""
    one, other = _explicit(one), _explicit(other)
    return [
        f"{field.name} {getattr(other, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if getattr(one, field.name) != getattr(other, field.name)
    ]


def _explicit(config: ModelConfig) -> ModelConfig:
    pieces = _pieces(config) if config.family in OF_CUSTOM_CODE else {}
    return dataclasses.replace(
        _inference(config),
        tied_logits=logits_are_tied(config),
        mlp_activations=activations(config) or None,
        **pieces,
    )


def _pieces(config: ModelConfig) -> dict[str, Any]:
    """Returns the parts of a decoder's layers, by our names."""
    layer = decoder_layer(config)
    (norm,) = (name for name, norm in NORMS.items() if norm == layer.norm)
    return {
        "mixer": config.mixer or "attention",
        "norm": norm,
        "norm_placement": config.norm_placement or "pre",
        "mlp_bias": layer.feed_forward.bias,
    }


def _inference(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        config,
        dropout_rate=0.0,
        dtype="float32",
        scan_layers=False,
        remat="none",
        attention="einsum",
    )


def _plain(config: ModelConfig) -> ModelConfig:
    """Returns the model with its family's own parts; in BERT, with heads as wide as the model."""
    fills = config.emb_dim // config.num_heads
    return ModelConfig(
        family=config.family,
        vocab_size=config.vocab_size,
        emb_dim=config.emb_dim,
        num_heads=config.num_heads,
        head_dim=fills if config.family == "bert" else config.head_dim,
        mlp_dim=config.mlp_dim,
        num_encoder_layers=config.num_encoder_layers,
        num_decoder_layers=config.num_decoder_layers,
        max_positions=config.max_positions if config.family == "bert" else 512,
        tied_logits=config.tied_logits,
    )


def to_config(config: ModelConfig, positions: int, mt5: bool = False) -> dict[str, Any]:
    """Returns the contents of config.json for a model that `refusal` accepts.

    Args:
      positions: the longest row of training, for models that record it.
      mt5: call an untied T5 mT5, from which it differs only in its vocabulary.
    """
    written = _WRITERS[config.family](config, positions)
    if mt5 and not logits_are_tied(config):
        written |= {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
    return {
        **written,
        "vocab_size": config.vocab_size,
        "pad_token_id": PAD_ID if config.num_encoder_layers else EOS_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": logits_are_tied(config),
        "dtype": "float32",
    }


def _to_t5(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": config.emb_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": _T5_PROJECTIONS[activations(config)],
        "relative_attention_num_buckets": _BUCKETS,
        "relative_attention_max_distance": _DISTANCE,
        "layer_norm_epsilon": _EPSILON["t5"],
        "dropout_rate": config.dropout_rate,
        "decoder_start_token_id": PAD_ID,
        # transformers scales tied logits, and without this field reads "tied" as "scaled".
        "scale_decoder_outputs": logits_are_tied(config),
    }


def _to_decoder(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_decoder_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS[activations(config)[0]],
        "rms_norm_eps": _EPSILON["t5"],
        # Rows begin with id 0 in training.
        "bos_token_id": PAD_ID,
    }


def _to_llama(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_to_decoder(config, positions),
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROTARY_BASE},
        "attention_bias": False,
        "mlp_bias": False,
    }


def _to_custom(config: ModelConfig, positions: int) -> dict[str, Any]:
    if TRANSFORMERS not in config.mixer_facts.exports:
        raise KeyError(config.mixer)
    module = f"modeling_{CUSTOM}"
    return {
        "architectures": ["PalimpsestForCausalLM"],
        "model_type": CUSTOM,
        "auto_map": {
            "AutoConfig": f"{module}.PalimpsestConfig",
            "AutoModelForCausalLM": f"{module}.PalimpsestForCausalLM",
        },
        **_to_decoder(config, positions),
        "family": config.family,
        "gated_mlp": len(activations(config)) == 2,
        **_pieces(config),
        "relative_attention_num_buckets": _BUCKETS,
        "relative_attention_max_distance": _DISTANCE,
    }


def _to_bert(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        # The file has both heads; BertForMaskedLM loads its own.
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_encoder_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": _ACTIVATIONS[activations(config)[0]],
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.dropout_rate,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": 2,
        "layer_norm_eps": _EPSILON["bert"],
    }


_WRITERS: Mapping[str, Callable[[ModelConfig, int], dict[str, Any]]] = MappingProxyType(
    {
        "t5_1_0": _to_t5,
        "t5_1_1": _to_t5,
        "llama": _to_llama,
        "lm": _to_custom,
        "primer": _to_custom,
        "bert": _to_bert,
    }
)


def from_config(written: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model of a config.json, with the folder's sizes and dropout and our defaults.

    Raises:
      UserError: we do not support the model; names the field.
    """
    kind = str(written.get("model_type"))
    if kind not in _READERS:
        raise UserError(
            f"{where}: model_type is {kind}; this reads {', '.join(sorted(_READERS))} folders"
        )
    fields = {name: value for name, value in written.items() if value is not None}
    try:
        return _READERS[kind](_Fields(fields, where))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


class _Fields:
    """The fields of a config.json that are not null."""

    def __init__(self, fields: dict[str, Any], where: str):
        self._fields, self._where = fields, where

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise UserError(f"{self._where} has no field {name}")
        return self._fields[name]

    def get(self, name: str, default: Any) -> Any:
        return self._fields.get(name, default)

    def require(self, name: str, expected: Any, default: Any = None) -> None:
        """Refuses a value that is not `expected`; `default` is transformers' if it is another."""
        found = self._fields.get(name, expected if default is None else default)
        if found != expected:
            raise UserError(f"{self._where}: {name} is {found}; our models have {expected}")

    def named(self, name: str, known: Mapping[Any, str], default: Any = None) -> Any:
        """Returns our name of a field's value."""
        found = self._fields.get(name, default)
        for ours, theirs in known.items():
            if theirs == found:
                return ours
        raise UserError(f"{self._where}: {name} is {found}; this knows {', '.join(known.values())}")


_OTHER_T5 = (
    *(f"{place}_attention_layer" for place in ("encoder_self", "decoder_self", "decoder_cross")),
    *("num_cdq_heads", "num_memory_tokens"),
)


def _from_t5(fields: _Fields) -> ModelConfig:
    fields.require("relative_attention_num_buckets", _BUCKETS)
    fields.require("relative_attention_max_distance", _DISTANCE)
    fields.require("layer_norm_epsilon", _EPSILON["t5"])
    # Other attentions and memory tokens of t5-experiments, under T5's model_type.
    for name in _OTHER_T5:
        fields.require(name, None)
    mt5 = fields["model_type"] == "mt5"
    projection = fields.named("feed_forward_proj", _T5_PROJECTIONS, "gated-gelu" if mt5 else "relu")
    # In T5 "scaled" and "tied" are the same; mT5's logits are neither, whatever the file says.
    tied = not mt5 and bool(
        fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True))
    )
    family = "t5_1_0" if tied else "t5_1_1"
    return ModelConfig(
        family=family,
        vocab_size=fields["vocab_size"],
        emb_dim=fields["d_model"],
        num_heads=fields["num_heads"],
        head_dim=fields["d_kv"],
        mlp_dim=fields["d_ff"],
        num_encoder_layers=fields["num_layers"],
        num_decoder_layers=fields.get("num_decoder_layers", fields["num_layers"]),
        dropout_rate=fields.get("dropout_rate", 0.0),
        tied_logits=tied,
        mlp_activations=projection,
    )


def _from_decoder(fields: _Fields, family: str, gated: bool = True, **pieces: Any) -> ModelConfig:
    heads = fields["num_attention_heads"]
    fields.require("num_key_value_heads", heads)
    fields.require("rms_norm_eps", _EPSILON["t5"])
    activation = fields.named("hidden_act", _ACTIVATIONS, "silu")
    return ModelConfig(
        family=family,
        vocab_size=fields["vocab_size"],
        emb_dim=fields["hidden_size"],
        num_heads=heads,
        head_dim=fields.get("head_dim", fields["hidden_size"] // heads),
        mlp_dim=fields["intermediate_size"],
        num_encoder_layers=0,
        num_decoder_layers=fields["num_hidden_layers"],
        tied_logits=fields.get("tie_word_embeddings", False),
        mlp_activations=(activation, "linear") if gated else (activation,),
        **pieces,
    )


def _from_llama(fields: _Fields) -> ModelConfig:
    for name in ("attention_bias", "mlp_bias"):
        fields.require(name, False)
    rope = fields.get("rope_parameters", {})
    found = (
        rope.get("rope_type", "default"),
        rope.get("rope_theta", fields.get("rope_theta", _ROTARY_BASE)),
    )
    if found != ("default", _ROTARY_BASE) or fields.get("rope_scaling", None):
        raise ValueError(
            f"rotary positions of kind {found[0]} and base {found[1]:g}; our models have kind "
            f"default and base {_ROTARY_BASE:g}"
        )
    return _from_decoder(fields, "llama")


def _from_custom(fields: _Fields) -> ModelConfig:
    # Folders written before Primer was added have none of these; ModelConfig's None then stands.
    names = ("mixer", "norm", "norm_placement", "mlp_bias")
    pieces = {name: fields.get(name, None) for name in names}
    family = str(fields.get("family", "lm"))
    return _from_decoder(fields, family, bool(fields.get("gated_mlp", True)), **pieces)


def _from_bert(fields: _Fields) -> ModelConfig:
    fields.require("type_vocab_size", 2)
    fields.require("layer_norm_eps", _EPSILON["bert"])
    fields.require("position_embedding_type", "absolute")
    heads = fields["num_attention_heads"]
    return ModelConfig(
        family="bert",
        vocab_size=fields["vocab_size"],
        emb_dim=fields["hidden_size"],
        num_heads=heads,
        head_dim=fields["hidden_size"] // heads,
        mlp_dim=fields["intermediate_size"],
        num_encoder_layers=fields["num_hidden_layers"],
        num_decoder_layers=0,
        dropout_rate=fields.get("hidden_dropout_prob", 0.1),
        max_positions=fields["max_position_embeddings"],
        tied_logits=fields.get("tie_word_embeddings", True),
        mlp_activations=(fields.named("hidden_act", _ACTIVATIONS, "gelu"),),
    )


_READERS: Mapping[str, Callable[[_Fields], ModelConfig]] = MappingProxyType(
    {
        "t5": _from_t5,
        "mt5": _from_t5,
        "llama": _from_llama,
        CUSTOM: _from_custom,
        "bert": _from_bert,
    }
)
