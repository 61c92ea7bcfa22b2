"""Gemma 1 and 2, and the text models of Gemma 3, in transformers.

Source: transformers 5.23, modeling_gemma.py, modeling_gemma2.py and modeling_gemma3.py; Gemma 2
(arXiv:2408.00118), section 2; Gemma 3 (arXiv:2503.19786), section 2.
"""

from dataclasses import replace
from typing import Any

from trainer.annexes.layer_types import layer_types
from trainer.huggingface import formats, rotary
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS
from trainer.model.config import ModelConfig
from trainer.model.registry import Rotary

# transformers' defaults: the distance between global layers, and bases of rotary positions.
_EVERY_2, _EVERY_3 = 2, 6
_WINDOW = 4096
_GLOBAL_BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0


def _read_1(fields: Fields) -> ModelConfig:
    # Early releases read this field, and used the same function without it.
    fields.named("hidden_activation", {"gelu": "gelu_new"}, "gelu_new")
    fields.require("use_bidirectional_attention", None)
    for name in ("head_dim", "num_key_value_heads"):
        fields[name]  # required, because transformers' defaults differ from ours
    config = formats.from_decoder(
        fields,
        "gemma",
        activation="gelu_new",
        norm=formats.norm_of("rms_norm", fields.get("rms_norm_eps", 1e-6), gain="offset"),
        position=rotary.read(fields),
        attention_bias=fields.get("attention_bias", False),
        tied_logits=fields.get("tie_word_embeddings", True),
    )
    if config.mlp_activations == ("gelu_erf", "linear"):
        # Early folders write "gelu" for the tanh approximation.
        config = replace(config, mlp_activations=("gelu", "linear"))
    return config


def _write_1(config: ModelConfig, positions: int) -> dict[str, Any]:
    if config.emb_dim % config.num_heads:
        raise KeyError("num_heads")  # transformers refuses such a Gemma
    written = formats.to_rotary_decoder(config, positions, "GemmaForCausalLM")
    return {**written, "hidden_act": "gelu_pytorch_tanh"}  # Gemma uses torch's name


def _types(fields: Fields, every: int) -> list[str]:
    return [
        layer_types.SLIDING if number % every else layer_types.FULL
        for number in range(1, fields.size("num_hidden_layers") + 1)
    ]


def _scalar(fields: Fields) -> float:
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar is {scalar:g}: it must be above 0")
    return scalar


def _read(fields: Fields, caps: tuple[float | None, float | None], **pieces: Any) -> ModelConfig:
    """Returns the model; `caps` are transformers' defaults for attention and logits."""
    fields.require("use_bidirectional_attention", False)
    for name in ("head_dim", "num_key_value_heads"):
        fields[name]  # required, because transformers' defaults differ from ours
    fields.get("hidden_act", None)  # transformers ignores it
    return formats.from_decoder(
        fields,
        "gemma",
        activation="gelu_new",
        activation_field="hidden_activation",
        norm=formats.norm_of("rms_norm", fields.get("rms_norm_eps", 1e-6), gain="offset"),
        norm_placement="sandwich",
        attention_scale=_scalar(fields) ** -0.5,
        attention_softcap=fields.nullable("attn_logit_softcapping", caps[0]),
        logits_softcap=fields.nullable("final_logit_softcapping", caps[1]),
        attention_bias=fields.get("attention_bias", False),
        tied_logits=fields.get("tie_word_embeddings", True),
        **pieces,
    )


def read_2(fields: Fields) -> ModelConfig:
    """Returns a model of Gemma 2."""
    window = fields.nullable("sliding_window", _WINDOW)
    return _read(
        fields,
        (50.0, 30.0),
        position=rotary.read(fields),
        attention_window=layer_types.read(fields, window, _types(fields, _EVERY_2)),
    )


def read_3(fields: Fields) -> ModelConfig:
    """Returns a model of Gemma 3."""
    fields.require("attn_logit_softcapping", None)  # transformers ignores it
    window = fields.nullable("sliding_window", _WINDOW)
    every = fields.size("sliding_window_pattern", _EVERY_3)
    # transformers writes this field and ignores it.
    if "layer_types" not in fields and "sliding_window_pattern" not in fields:
        fields.require("_sliding_window_pattern", every)
    # transformers 4 has a base and a scaling for global layers, and a base for local ones. Its
    # successor adds the scaling's fields to those that it has; with "type" alone, the kind stays.
    of_global, of_local = layer_types.ropes(fields)
    of_global = {"rope_type": "default", **of_global, **fields.get("rope_scaling", {})}
    base = layer_types.local_base(of_local, fields.get("rope_local_base_freq", _LOCAL_BASE))
    return _read(
        fields,
        (None, None),
        query_key_norm=True,
        position=rotary.of(of_global, fields, _GLOBAL_BASE, per_type=True),
        attention_window=layer_types.read(fields, window, _types(fields, every), base=base),
    )


def _write(config: ModelConfig, positions: int, architecture: str) -> dict[str, Any]:
    window = layer_types.window_of(config)
    written = formats.to_rotary_decoder(config, positions, architecture)
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    if abs(scalar - round(scalar)) > 1e-9 * scalar:
        raise KeyError("attention_scale")  # transformers allows whole numbers alone
    return {
        **{name: value for name, value in written.items() if name != "hidden_act"},
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logits_softcap,
        # Without local layers it has no effect, but transformers needs a number.
        "sliding_window": window.window if window else _WINDOW,
        "layer_types": layer_types.written(config),
    }


def write_2(config: ModelConfig, positions: int) -> dict[str, Any]:
    """Returns the fields of a model of Gemma 2."""
    return _write(config, positions, "Gemma2ForCausalLM")


def write_3(config: ModelConfig, positions: int) -> dict[str, Any]:
    """Returns the fields of a model of Gemma 3."""
    written, window = _write(config, positions, "Gemma3ForCausalLM"), layer_types.window_of(config)
    ours = config.part("position").options
    if config.attention_softcap is not None:
        raise KeyError("attention_softcap")
    if window is not None and window.base is None and ours != Rotary(base=ours.base):
        raise KeyError("attention_window")  # local layers are never scaled
    base = ours.base if window is None or window.base is None else window.base
    bases = {
        layer_types.FULL: written["rope_parameters"],
        layer_types.SLIDING: {"rope_type": "default", "rope_theta": base},
    }
    return {**written, "rope_parameters": bases, "rope_local_base_freq": base}


GEMMA = KINDS["llama"]._replace(
    read=_read_1,
    write=_write_1,
    families=("gemma", "llama", "lm"),
    compared=("GemmaForCausalLM",),
)
GEMMA2 = GEMMA._replace(
    read=read_2,
    write=write_2,
    families=("gemma",),
    inert=GEMMA.inert | {"_sliding_window_pattern"},
    compared=("Gemma2ForCausalLM",),
)
GEMMA3_TEXT = GEMMA2._replace(read=read_3, write=write_3, compared=("Gemma3ForCausalLM",))
