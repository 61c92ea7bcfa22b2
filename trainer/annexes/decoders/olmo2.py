"""OLMo 2: norms of sublayers' outputs, and of all heads' queries and keys together.

Source: transformers 5.23, modeling_olmo2.py; OLMo 2 (arXiv:2501.00656), section 3.2.
"""

from typing import Any

from trainer.huggingface import formats, module_names
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS, Kind
from trainer.model.config import ModelConfig
from trainer.model.registry import JOINED


def _read(fields: Fields) -> ModelConfig:
    return formats.from_llama_like(
        fields,
        1e-5,
        norm_placement="branch",
        query_key_norm=True,
        query_key_norm_over=JOINED,
        attention_bias=fields.get("attention_bias", False),
    )


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    return formats.to_rotary_decoder(config, positions, "Olmo2ForCausalLM")


OLMO2 = Kind(
    *(_read, _write, module_names.decoder, ("llama",), "model.", KINDS["llama"].inert),
    compared=("Olmo2ForCausalLM",),
)
