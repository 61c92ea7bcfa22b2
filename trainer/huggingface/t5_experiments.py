"""Reads t5-experiments' folders: T5 and BERT under transformers' model_type, with extra fields.

Its T5 can have cdQ in the encoder and memory tokens; its BERT can have norms before the sublayers
and relative or rotary positions. transformers would read such a folder as a plain model.

Source: t5-experiments, `modeling_t5.py`, `modeling_bert.py`, `t5configs` and `bert_configs`, for
the names of fields and tensors and the defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.huggingface.fields import Fields
from trainer.model import parts
from trainer.model.config import ModelConfig
from trainer.model.slots import Choice
from trainer.model.spec import model_spec
from trainer.zoo.t5_experiments import ConditionalQueries
from trainer.zoo.t5_experiments_parts import ConditionalQueryAttention

_ATTENTION, _CDQ = "modeling_t5:T5Attention", "modeling_t5:T5CDQAttention"
# Our encoder mixers with known tensor names -> theirs.
MIXERS = {"attention": _ATTENTION, "cdq": _CDQ}


def t5_parts(fields: Fields) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that such a T5 changes; none for a plain T5."""
    if fields["model_type"] != "t5":
        for name in ("encoder_self_attention_layer", "num_cdq_heads", "num_memory_tokens"):
            fields.require(name, None)
    for place in ("decoder_self", "decoder_cross"):
        fields.require(f"{place}_attention_layer", _ATTENTION)
    changed: dict[str, Any] = {}
    name = fields.named("encoder_self_attention_layer", MIXERS, _ATTENTION)
    if name == "cdq":
        heads = fields.size("num_cdq_heads")
        chosen = None if heads == fields.size("num_heads") else heads
        changed["mixer"] = str(Choice(name, ConditionalQueries(chosen)))
    if tokens := fields.get("num_memory_tokens", 0):
        changed["memory_tokens"] = tokens
    return changed


def bert_parts(fields: Fields) -> dict[str, Any]:
    """Returns a BERT's family and position; raises UserError if the model is not supported."""
    for name in ("sparse_config_cls", "sparse_attention"):
        fields.require(name, None)
    pre = bool(fields.get("pre_layer_norm", False))
    fields.require("last_layer_norm", pre)
    position = fields.named("position_embedding_type", _BERT_POSITIONS, "absolute")
    text = _POSITION_OPTIONS[position](fields)
    return {"family": "bert_pre_ln" if pre else "bert", "position": text}


def warning(config: ModelConfig) -> str | None:
    """Returns a caveat about the weights of a BERT with T5's positions; None for other models."""
    if config.position_scheme != "relative" or config.architecture != "encoder":
        return None
    return (
        "t5-experiments trained such models without adding relative_attention_bias to the logits: "
        "the bias still has its initial values, and the weights were trained without positions"
    )


def _relative(fields: Fields) -> str:
    chosen = parts.Relative(
        fields.size("relative_attention_num_buckets"), fields.size("relative_last_bucket_distance")
    )
    return str(Choice("relative", chosen))


def _rotary(fields: Fields) -> str:
    head_dim = fields.size("hidden_size") // fields.size("num_attention_heads")
    rotated = fields.get("rotary_dim", head_dim)
    base = float(fields.get("rotary_base", 10_000))
    return str(Choice("rotary", parts.Rotary(base, rotated / head_dim)))


_BERT_POSITIONS = {
    "absolute": "absolute",
    "relative": "relative_attention_bias",
    "rotary": "rotary",
}
_POSITION_OPTIONS: Mapping[str, Callable[[Fields], str]] = {
    "absolute": lambda _: "absolute",
    "relative": _relative,
    "rotary": _rotary,
}

MEMORY = "memory_tokens"
# The encoder may register the parameter a second time.
MEMORY_COPY = f"encoder.{MEMORY}"

_CONDITIONAL = {"pool": "T", "pool_hidden": "W_t", "condition": "cd_w", "conditional_query": "cd_q"}


def encoder_projections(config: ModelConfig, plain: Mapping[str, str]) -> dict[str, str]:
    """Maps a T5 encoder's attention kernels from our names to theirs; `plain` is T5's mapping."""
    mixer = model_spec(config).stacks["encoder"].layers[0].mixer
    if not isinstance(mixer, ConditionalQueryAttention):
        return dict(plain)
    names = {**plain, **_CONDITIONAL}
    if not mixer.plain_heads:
        del names["query"]
    return names
