"""Mistral: Llama with a window.

Source: transformers 5.23, modeling_mistral.py; Mistral 7B (arXiv:2310.06825).
"""

from typing import Any

from trainer.annexes.layer_types import layer_types
from trainer.huggingface import formats, module_names
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS, Kind
from trainer.model.config import ModelConfig


def _read(fields: Fields) -> ModelConfig:
    window = fields.nullable("sliding_window", 4096)
    types = [layer_types.SLIDING] * fields.size("num_hidden_layers")
    fields.require("layer_types", types if "layer_types" in fields else None)
    windows = layer_types.read(fields, window, types)
    fields.require("attention_bias", False)  # transformers ignores it
    return formats.from_llama_like(fields, attention_window=windows)


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    window = layer_types.window_of(config)
    written = formats.to_rotary_decoder(config, positions, "MistralForCausalLM")
    del written["attention_bias"]
    return {**written, "sliding_window": window.window if window else None}


MISTRAL = Kind(
    *(_read, _write, module_names.decoder, ("llama",), "model.", KINDS["llama"].inert),
    compared=("MistralForCausalLM",),
)
