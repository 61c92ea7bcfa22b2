"""Reads transformers' config.json for each supported model_type."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.huggingface import t5_experiments
from trainer.huggingface.config_writers import (
    ACTIVATIONS,
    CUSTOM,
    OUR_BUCKETS,
    OUR_DISTANCE,
    T5_PROJECTIONS,
)
from trainer.model import parts
from trainer.model.config import ModelConfig
from trainer.model.parts import PER_LAYER
from trainer.model.slots import Choice

# transformers' synonyms.
_SYNONYMS = MappingProxyType({"gelu_pytorch_tanh": "gelu_new", "swish": "silu"})


def from_config(
    written: Mapping[str, Any], where: str, tensors: Collection[str] = ()
) -> ModelConfig:
    """Returns the model of a config.json at `where`, with its sizes and dropout and our defaults.

    `tensors` are the folder's tensor names, if known: transformers 5 records every T5's logits as
    tied, but stores the kernel of untied ones. A UserError names the unsupported field.
    """
    kind = str(written.get("model_type"))
    if kind not in _READERS:
        raise UserError(
            f"{where}: model_type is {kind}; this reads {', '.join(sorted(_READERS))} folders"
        )
    fields = {name: value for name, value in written.items() if value is not None}
    try:
        return _READERS[kind](_Fields(fields, where, tensors))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    except TypeError as error:
        texts = [f"{name} is {value!r}" for name, value in fields.items() if _is_number(value)]
        if not texts:
            raise
        raise UserError(f"{where}: {', '.join(texts)}: write a number without quotes") from error


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number in quotes, which no transformers field is."""
    return isinstance(value, str) and re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value) is not None


class _Fields:
    """The non-null fields of a config.json."""

    def __init__(self, fields: dict[str, Any], where: str, tensors: Collection[str]):
        self._fields, self._where, self.tensors = fields, where, tensors

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise UserError(f"{self._where} has no field {name}")
        return self._fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str, default: Any) -> Any:
        return self._fields.get(name, default)

    def require(self, name: str, expected: Any, default: Any = None) -> None:
        """Refuses a value other than `expected`; `default` is transformers', if different."""
        found = self._fields.get(name, expected if default is None else default)
        if found != expected:
            raise UserError(f"{self._where}: {name} is {found}; our models have {expected}")

    def named(self, name: str, known: Mapping[Any, str], default: Any = None) -> Any:
        """Returns our name for a field's value."""
        found = self._fields.get(name, default)
        for ours, theirs in known.items():
            if theirs == _SYNONYMS.get(str(found), found):
                return ours
        raise UserError(f"{self._where}: {name} is {found}; this knows {', '.join(known.values())}")


def _norm(kind: str, epsilon: float, **others: Any) -> str:
    return str(Choice(kind, _NORM_OPTIONS[kind](epsilon=float(epsilon), **others)))


_NORM_OPTIONS = {"rms_norm": parts.NormOptions, "layer_norm": parts.LayerNormOptions}


def _from_t5(fields: _Fields) -> ModelConfig:
    kind = fields["model_type"]
    relative = parts.Relative(
        num_buckets=fields.get("relative_attention_num_buckets", 32),
        max_distance=fields.get("relative_attention_max_distance", 128),
    )
    standard = "relu" if kind == "t5" else "gated-gelu"
    projection = fields.named("feed_forward_proj", T5_PROJECTIONS, standard)
    # transformers derives these two fields, but obeys explicit values.
    activation = ACTIVATIONS[projection[0]]
    fields.require("dense_act_fn", activation)
    fields.require("is_gated_act", len(projection) == 2)
    # transformers 5 records all logits as tied, but stores the kernel of untied ones. mT5's logits
    # are never scaled. Without `scale_decoder_outputs`, a field of T5 only, tied logits are scaled.
    tied = bool(fields.get("tie_word_embeddings", kind == "t5"))
    scaled = bool(fields.get("scale_decoder_outputs", tied)) and kind != "mt5"
    if kind != "t5" or not scaled:
        tied = tied and "lm_head.weight" not in fields.tensors
    return ModelConfig(
        family="t5_1_0" if tied else "t5_1_1",
        vocab_size=fields["vocab_size"],
        emb_dim=fields["d_model"],
        num_heads=fields["num_heads"],
        head_dim=fields["d_kv"],
        mlp_dim=fields["d_ff"],
        num_encoder_layers=fields["num_layers"],
        num_decoder_layers=fields.get("num_decoder_layers", fields["num_layers"]),
        dropout_rate=fields.get("dropout_rate", 0.0),
        tied_logits=tied,
        logits_scale=1.0 if tied and not scaled else None,
        mlp_activations=projection,
        norm=_norm("rms_norm", fields.get("layer_norm_epsilon", 1e-6)),
        position=str(Choice(PER_LAYER if kind == "umt5" else "relative", relative)),
        **t5_experiments.t5_parts(fields),
    )


def _from_decoder(
    fields: _Fields, family: str, gated: bool = True, activation: str = "silu", **pieces: Any
) -> ModelConfig:
    """Returns a decoder; `activation` is transformers' default for a missing field."""
    heads = fields["num_attention_heads"]
    kv_heads = fields.get("num_key_value_heads", heads)
    activation = fields.named("hidden_act", ACTIVATIONS, activation)
    return ModelConfig(
        family=family,
        vocab_size=fields["vocab_size"],
        emb_dim=fields["hidden_size"],
        num_heads=heads,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=fields.get("head_dim", fields["hidden_size"] // heads),
        mlp_dim=fields["intermediate_size"],
        num_encoder_layers=0,
        num_decoder_layers=fields["num_hidden_layers"],
        mlp_activations=(activation, "linear") if gated else (activation,),
        **pieces,
    )


def _rotary(fields: _Fields) -> str:
    rope = {**fields.get("rope_scaling", {}), **fields.get("rope_parameters", {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"rotary positions of kind {kind}; our models have kind default, linear or llama3"
        )
    values: dict[str, Any] = {
        "base": float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0)))
    }

    def needed(name: str) -> float:
        if rope.get(name) is None:
            raise ValueError(f"rope_parameters of kind {kind} have no {name}")
        return float(rope[name])

    if kind != "default":
        values |= {"scaling": kind, "factor": needed("factor")}
    if kind == "llama3":
        # transformers' fallback for a missing field.
        original = "original_max_position_embeddings"
        if rope.get(original) is None:
            rope[original] = fields.get("max_position_embeddings", None)
        values |= {
            "low_frequency": needed("low_freq_factor"),
            "high_frequency": needed("high_freq_factor"),
            "original_positions": int(needed(original)),
        }
    return str(Choice("rotary", parts.Rotary(**values)))


def _from_llama(fields: _Fields) -> ModelConfig:
    return _from_decoder(
        fields,
        "llama",
        norm=_norm("rms_norm", fields.get("rms_norm_eps", 1e-6)),
        position=_rotary(fields),
        attention_bias=fields.get("attention_bias", False),
        mlp_bias=fields.get("mlp_bias", False),
        tied_logits=fields.get("tie_word_embeddings", False),
    )


def _from_gemma(fields: _Fields) -> ModelConfig:
    fields.require("use_bidirectional_attention", None)
    for name in ("head_dim", "num_key_value_heads"):
        fields[name]  # transformers has defaults of its own for them
    config = _from_decoder(
        fields,
        "gemma",
        activation="gelu_new",
        norm=_norm("rms_norm", fields.get("rms_norm_eps", 1e-6), gain="offset"),
        position=_rotary(fields),
        attention_bias=fields.get("attention_bias", False),
        tied_logits=fields.get("tie_word_embeddings", True),
    )
    if config.mlp_activations == ("gelu_erf", "linear"):
        # Early folders write "gelu" for the tanh approximation.
        config = dataclasses.replace(config, mlp_activations=("gelu", "linear"))
    return config


def _from_gpt2(fields: _Fields) -> ModelConfig:
    for name, expected in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        fields.require(name, expected)
    heads, width = fields["n_head"], fields["n_embd"]
    return ModelConfig(
        family="gpt2",
        vocab_size=fields["vocab_size"],
        emb_dim=width,
        num_heads=heads,
        head_dim=width // heads,
        mlp_dim=fields.get("n_inner", 4 * width),
        num_encoder_layers=0,
        num_decoder_layers=fields["n_layer"],
        dropout_rate=fields.get("resid_pdrop", 0.1),
        max_positions=fields["n_positions"],
        tied_logits=fields.get("tie_word_embeddings", True),
        mlp_activations=(fields.named("activation_function", ACTIVATIONS, "gelu_new"),),
        norm=_norm("layer_norm", fields.get("layer_norm_epsilon", 1e-5)),
    )


def _from_custom(fields: _Fields) -> ModelConfig:
    # Folders written before Primer was added lack these; ModelConfig's None then applies.
    names = ("mixer", "norm", "norm_placement", "mlp_bias")
    pieces = {name: fields.get(name, None) for name in names}
    fields.require("num_key_value_heads", fields["num_attention_heads"])
    fields.require("rms_norm_eps", 1e-6)
    fields.require("relative_attention_num_buckets", OUR_BUCKETS)
    fields.require("relative_attention_max_distance", OUR_DISTANCE)
    return _from_decoder(
        fields,
        str(fields.get("family", "lm")),
        bool(fields.get("gated_mlp", True)),
        tied_logits=fields.get("tie_word_embeddings", False),
        **pieces,
    )


def _from_bert(fields: _Fields) -> ModelConfig:
    fields.require("type_vocab_size", 2)
    for name in ("is_decoder", "add_cross_attention"):
        fields.require(name, False)
    heads = fields["num_attention_heads"]
    return ModelConfig(
        **t5_experiments.bert_parts(fields),
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
        mlp_activations=(fields.named("hidden_act", ACTIVATIONS, "gelu"),),
        norm=_norm("layer_norm", fields.get("layer_norm_eps", 1e-12)),
    )


_READERS: Mapping[str, Callable[[_Fields], ModelConfig]] = MappingProxyType(
    {
        "t5": _from_t5,
        "mt5": _from_t5,
        "umt5": _from_t5,
        "llama": _from_llama,
        "gemma": _from_gemma,
        "gpt2": _from_gpt2,
        CUSTOM: _from_custom,
        "bert": _from_bert,
    }
)
