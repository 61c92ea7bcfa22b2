"""Reads t5-experiments' folders: T5 and BERT under transformers' model_type, with extra fields.

Its T5 can have cdQ in the encoder and memory tokens; its BERT can have norms before the sublayers
and relative or rotary positions. transformers would read such a folder as a plain model.

Source: t5-experiments, `modeling_t5.py`, `modeling_bert.py`, `t5configs` and `bert_configs`, for
the names of fields and tensors and the defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.annexes.t5_experiments.layers import ConditionalQueryAttention
from trainer.annexes.t5_experiments.parts import ConditionalQueries, MemoryTokens
from trainer.huggingface import formats, module_names
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS
from trainer.huggingface.module_names import affine, layers
from trainer.model import registry
from trainer.model.config import ModelConfig
from trainer.model.slot import Choice
from trainer.model.spec import model_spec

_ATTENTION, _CDQ = "modeling_t5:T5Attention", "modeling_t5:T5CDQAttention"
# Our encoder mixers with known tensor names -> theirs.
_MIXERS = {"attention": _ATTENTION, "cdq": _CDQ}


def _read_t5(fields: Fields) -> ModelConfig:
    for place in ("decoder_self", "decoder_cross"):
        fields.require(f"{place}_attention_layer", _ATTENTION)
    changed: dict[str, Any] = {}
    name = fields.named("encoder_self_attention_layer", _MIXERS, _ATTENTION)
    if name == "cdq":
        heads = fields.size("num_cdq_heads")
        chosen = None if heads == fields.size("num_heads") else heads
        changed["mixer"] = str(Choice(name, ConditionalQueries(chosen)))
    if tokens := fields.get("num_memory_tokens", 0):
        changed["stack_parts"] = str(Choice("memory_tokens", MemoryTokens(tokens)))
    return formats.from_t5(fields, **changed)


def _read_bert(fields: Fields) -> ModelConfig:
    for name in ("sparse_config_cls", "sparse_attention"):
        fields.require(name, None)
    pre = bool(fields.get("pre_layer_norm", False))
    fields.require("last_layer_norm", pre)
    position = fields.named("position_embedding_type", _BERT_POSITIONS, "absolute")
    text = _POSITION_OPTIONS[position](fields)
    return formats.from_bert(fields, "bert_pre_ln" if pre else "bert", text)


def _warning(config: ModelConfig) -> str | None:
    """Returns a caveat about the weights of a BERT with T5's positions; None for other models."""
    if config.position_scheme != "relative" or config.has_decoder:
        return None
    return (
        "t5-experiments trained such models without adding relative_attention_bias to the logits: "
        "the bias still has its initial values, and the weights were trained without positions"
    )


def _relative(fields: Fields) -> str:
    chosen = registry.Relative(
        fields.size("relative_attention_num_buckets"), fields.size("relative_last_bucket_distance")
    )
    return str(Choice("relative", chosen))


def _rotary(fields: Fields) -> str:
    head_dim = fields.size("hidden_size") // fields.size("num_attention_heads")
    rotated = fields.get("rotary_dim", head_dim)
    base = float(fields.get("rotary_base", 10_000))
    return str(Choice("rotary", registry.Rotary(base, rotated / head_dim)))


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

_CONDITIONAL = {"pool": "T", "pool_hidden": "W_t", "condition": "cd_w", "conditional_query": "cd_q"}


def _t5_tensors(config: ModelConfig) -> dict[str, str]:
    mixer, names = model_spec(config).stacks["encoder"].layers[0].mixer, module_names.T5_PROJECTIONS
    if isinstance(mixer, ConditionalQueryAttention):
        names = {**names, **_CONDITIONAL}
        if not mixer.plain_heads:
            del names["query"]
    return module_names.t5(config, names)


def _bert_tensors(config: ModelConfig) -> dict[str, str]:
    modules = module_names.bert(config)
    if config.position_scheme == "relative":
        table = "bert.encoder.layer.0.attention.self.relative_attention_bias"
        modules["encoder/relpos_bias/rel_embedding"] = table
    if config.value("norm_placement") != "pre":
        return modules
    inside = {
        **affine("pre_attention_layer_norm", "pre_attention_ln"),
        **affine("pre_mlp_layer_norm", "post_attention_ln"),
    }
    return {
        **{path: name for path, name in modules.items() if "/post_" not in path},
        **affine("encoder/encoder_norm", "bert.encoder.last_layer_ln"),
        **layers("encoder", config.num_encoder_layers, "bert.encoder.layer", inside),
    }


_MEMORY = "memory_tokens"
T5 = KINDS["t5"]._replace(
    read=_read_t5,
    tensors=_t5_tensors,
    families=(),
    inert=KINDS["t5"].inert | {"num_cdq_heads"},
    bare={"memory_embedder/embedding": _MEMORY},
    mixers=("cdq",),
    # The encoder may register the parameter a second time.
    twice={f"encoder.{_MEMORY}": (_MEMORY,)},
)
BERT = KINDS["bert"]._replace(
    read=_read_bert,
    tensors=_bert_tensors,
    families=(),
    # Of positions that the model does not have.
    inert=frozenset(
        {
            *("relative_attention_num_buckets", "relative_last_bucket_distance"),
            *("rotary_dim", "rotary_base"),
        }
    ),
    warning=_warning,
)
