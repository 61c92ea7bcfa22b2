"""Qwen 2 and 3.

Source: transformers 5.23, modeling_qwen2.py and modeling_qwen3.py; Qwen3 (arXiv:2505.09388),
section 2, for the norms of queries and keys.
"""

from typing import Any

from trainer.annexes.layer_types import layer_types
from trainer.huggingface import formats, module_names
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS, Kind
from trainer.model.config import ModelConfig

# transformers' defaults.
_WINDOW, _FULL_LAYERS = 4096, 28


def _read(fields: Fields, **pieces: Any) -> ModelConfig:
    fields.require("use_mrope", False)
    window = fields.nullable("sliding_window", _WINDOW)
    window = window if fields.get("use_sliding_window", False) else None
    full = fields.get("max_window_layers", _FULL_LAYERS)
    types = [
        layer_types.SLIDING if window is not None and number >= full else layer_types.FULL
        for number in range(fields.size("num_hidden_layers"))
    ]
    windows = layer_types.read(fields, window, types)
    return formats.from_llama_like(fields, attention_window=windows, **pieces)


def _read_2(fields: Fields) -> ModelConfig:
    return _read(fields, attention_bias=True, attention_out_bias=False)


def _read_3(fields: Fields) -> ModelConfig:
    fields.size("head_dim")  # required, because transformers' default differs from ours
    return _read(fields, attention_bias=fields.get("attention_bias", False), query_key_norm=True)


def _write(config: ModelConfig, positions: int, architecture: str) -> dict[str, Any]:
    window = layer_types.window_of(config)
    return {
        **formats.to_rotary_decoder(config, positions, architecture),
        "use_sliding_window": window is not None,
        "sliding_window": window.window if window else None,
        "max_window_layers": config.num_decoder_layers,
        "layer_types": layer_types.written(config),
    }


def _write_2(config: ModelConfig, positions: int) -> dict[str, Any]:
    written = _write(config, positions, "Qwen2ForCausalLM")
    del written["attention_bias"]  # all but the last projection have biases
    return written


def _write_3(config: ModelConfig, positions: int) -> dict[str, Any]:
    return _write(config, positions, "Qwen3ForCausalLM")


QWEN2 = Kind(
    *(_read_2, _write_2, module_names.decoder, ("llama",), "model.", KINDS["llama"].inert),
    compared=("Qwen2ForCausalLM",),
)
QWEN3 = QWEN2._replace(read=_read_3, write=_write_3, compared=("Qwen3ForCausalLM",))
