"""LongT5: T5 whose encoder attends to a window, and perhaps to blocks of the whole row.

Source: transformers 5.23, modeling_longt5.py; LongT5 (arXiv:2112.07916), section 3.1.
"""

from typing import Any

from trainer.annexes.longt5.parts import TransientGlobal
from trainer.huggingface import formats, module_names
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS, Kind
from trainer.model.config import ModelConfig
from trainer.model.slot import Choice
from trainer.model.windows import Sliding

# transformers' defaults.
_RADIUS, _BLOCK = 127, 16
# encoder_attention_type -> the beginning of its module's name.
_MODULES = {"local": "Local", "transient-global": "TransientGlobal"}


def _read(fields: Fields) -> ModelConfig:
    kind = fields.named("encoder_attention_type", {name: name for name in _MODULES}, "local")
    window = 2 * fields.get("local_radius", _RADIUS) + 1
    block = fields.get("global_block_size", _BLOCK)  # without effect on a window alone
    choice = Choice("sliding", Sliding(window, decoder=False))
    if kind != "local":
        choice = Choice("transient_global", TransientGlobal(window, block))
    return formats.from_t5(fields, attention_window=str(choice))


_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    options = config.part("attention_window").options
    if not isinstance(options, Sliding | TransientGlobal):
        raise KeyError("attention_window")
    return {
        **formats.to_t5(config, positions),
        "architectures": ["LongT5ForConditionalGeneration"],
        "encoder_attention_type": _type(config),
        "local_radius": options.window // 2,
        "global_block_size": getattr(options, "block", _BLOCK),
    }


def _type(config: ModelConfig) -> str:
    sliding = config.part("attention_window").name == "sliding"
    return "local" if sliding else "transient-global"


def _tensors(config: ModelConfig) -> dict[str, str]:
    kind, modules = _type(config), module_names.t5(config)
    own = f"{_MODULES[kind]}SelfAttention"
    first = "encoder.block.0.layer.0.SelfAttention"
    if kind != "local":
        table = "encoder/relpos_bias/blocks/rel_embedding"
        modules[table] = f"{first}.global_relative_attention_bias"
        norm = module_names.affine(
            "attention/global_input_layer_norm",
            "layer.0.SelfAttention.global_input_layer_norm",
            False,
        )
        modules |= module_names.layers("encoder", config.num_encoder_layers, "encoder.block", norm)
    return {
        path: name.replace("SelfAttention", own) if path.startswith("encoder/") else name
        for path, name in modules.items()
    }


LONGT5 = Kind(
    *(_read, _write, _tensors, formats.T5S),
    inert=frozenset({"is_decoder"}),
    like_t5=True,
    embeddings=formats.T5_EMBEDDINGS,
    unused=KINDS["t5"].unused,
    missing=KINDS["t5"].missing,
    copies=_COPIES,
    compared=("LongT5ForConditionalGeneration",),
)
