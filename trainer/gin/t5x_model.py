"""What the arguments of T5X's models, optimizers and schedules mean for us.

Source: google-research/t5x: signatures and defaults of `models`, `adafactor`, `optimizers`, `utils`
and the networks of `examples`; seqio's vocabularies and optax for theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.config import NORMALIZERS
from trainer.gin.meaning import (
    MUST,
    Argument,
    Configurable,
    Reading,
    field,
    keep,
    nothing,
    only,
    refers,
    shown,
    take,
)
from trainer.gin.reader import Reference, Value

NO_DECODING = "no text is decoded during pretraining"
_OWN_CONVERTER = "the model's stacks choose the converter"

# flax.linen's names of activations -> ours.
_ACTIVATIONS = {"gelu": "gelu", "linear": "linear", "relu": "relu", "silu": "silu", "swish": "silu"}
# T5X's names of a layer's rematerialisation -> ours.
_REMAT = {"none": "none", "minimal": "dots", "full": "full"}


def _activations(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    for name in value:
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise ValueError(f"the activations are {', '.join(_ACTIVATIONS)}")
    return tuple(_ACTIVATIONS[name] for name in value)


def _remat(value: Any) -> str:
    if not isinstance(value, str) or value not in _REMAT:
        raise ValueError(f"it must be one of {', '.join(_REMAT)}")
    return _REMAT[value]


def none_is(meaning: Any) -> Callable[[Any], Any]:
    """What None stands for."""
    return lambda value: meaning if value is None else value


def _normalizer(reading: Reading, found: Value) -> None:
    value = found.value
    if value is None:
        reading.set("loss.normalizer", "sum", found.origin)
    elif isinstance(value, str) and value.lower() in NORMALIZERS:
        reading.set("loss.normalizer", value.lower(), found.origin)
    elif type(value) in (int, float):
        reading.set("loss.normalizer", "sum", found.origin)
        reading.set("loss.normalizing_constant", float(value), found.origin)
    else:
        names = ", ".join(repr(name.upper()) for name in NORMALIZERS if name != "sum")
        raise UserError(
            f"{found.origin}: loss_normalizing_factor = {shown(value)} must be None, a number or "
            f"one of {names}"
        )


SCHEDULE = Configurable(
    ("t5x.utils.create_learning_rate_scheduler",),
    {
        "factors": field("optimizer.schedule", "constant * linear_warmup * rsqrt_decay"),
        "base_learning_rate": field("optimizer.learning_rate", 0.5),
        "warmup_steps": field("optimizer.warmup_steps", 1000),
        "decay_factor": field("optimizer.decay_factor"),
        "steps_per_decay": field("optimizer.steps_per_decay"),
        "steps_per_cycle": field("optimizer.steps_per_cycle"),
        "step_offset": only(0, "the schedule counts the run's own steps"),
        "min_learning_rate": field("optimizer.minimum_learning_rate"),
    },
)
_FACTOR_RULES = Configurable(
    ("t5x.adafactor.standard_logical_factor_rules",),
    {},
)
_ADAFACTOR = Configurable(
    ("t5x.adafactor.Adafactor",),
    {
        "learning_rate": nothing("Trainer.learning_rate_fn goes before it", None),
        "factored": only(True, "raise min_dim_size_to_factor instead"),
        "multiply_by_parameter_scale": field("optimizer.multiply_by_parameter_scale"),
        "beta1": field("optimizer.beta1"),
        "decay_rate": field("optimizer.decay_rate"),
        "step_offset": field("optimizer.step_offset"),
        "clipping_threshold": field("optimizer.clipping_threshold", convert=none_is(math.inf)),
        "weight_decay_rate": field("optimizer.weight_decay"),
        "min_dim_size_to_factor": field("optimizer.min_dim_size_to_factor"),
        "epsilon1": field("optimizer.epsilon"),
        "epsilon2": field("optimizer.minimum_parameter_scale"),
        "dtype_momentum": only("float32", "moments are float32"),
        "factor_map": only(None, "tensors are factored by their sizes"),
        "logical_factor_rules": refers(_FACTOR_RULES, optional=True, default=None),
        "weight_decay_rate_lr_exponent": field("optimizer.weight_decay_rate_exponent"),
        "global_norm_clip_threshold": field("optimizer.clip_norm"),
        "max_parameter_scale": field("optimizer.maximum_parameter_scale"),
        "skip_nan_updates": only(False, "--on_nan=skip leaves whole updates out"),
    },
    {"optimizer.name": "adafactor"},
)


def _own_rate(reading: Reading, found: Value) -> None:
    """The learning rate of a wrapped optax optimizer, for which Trainer.learning_rate_fn only is
    what is logged."""
    if isinstance(found.value, Reference):
        reading.follow("learning_rate", found, (SCHEDULE,))
    else:
        reading.set("optimizer.schedule", "constant", found.origin)
        reading.set("optimizer.learning_rate", found.value, found.origin)


def _optax(name: str, b2: float, weight_decay: float, more: Mapping[str, Argument]) -> Configurable:
    return Configurable(
        (f"t5x.optimizers.{name}",),
        {
            "learning_rate": take(_own_rate, MUST),
            "b1": field("optimizer.beta1", 0.9),
            "b2": field("optimizer.beta2", b2),
            "weight_decay": field("optimizer.weight_decay", weight_decay),
            "mu_dtype": only(None, "moments are float32"),
            "mask": only(None, "--optimizer.no_weight_decay has patterns of what is spared"),
            **more,
        },
        # optax decays every tensor where nobody gives a mask.
        {"optimizer.name": name, "optimizer.no_weight_decay": ()},
    )


_ADAMW = _optax(
    "adamw",
    b2=0.999,
    weight_decay=1e-4,
    more={
        "eps": field("optimizer.epsilon", 1e-8),
        "eps_root": only(0.0, "it is 0 here"),
        "nesterov": only(False, "momentum is Adam's own"),
    },
)
_LION = _optax("lion", b2=0.99, weight_decay=1e-3, more={})

_SENTENCEPIECE = Configurable(
    ("seqio.SentencePieceVocabulary", "seqio.vocabularies.SentencePieceVocabulary"),
    {
        "sentencepiece_model_file": field("vocabulary.model_file", MUST),
        "extra_ids": field("vocabulary.extra_ids"),
        "normalizer_spec_overrides": only(None, "pipeline.build normalizes as the model says"),
        "reverse_extra_ids": only(True, "sentinels descend from the last id"),
        "use_fast_tokenizer": nothing("the tokenizer gives SentencePiece's ids and is fast", False),
    },
)
_BYTES = Configurable(
    ("seqio.ByteVocabulary", "seqio.vocabularies.ByteVocabulary"),
    {"extra_ids": field("vocabulary.extra_ids")},
)
_PASS_THROUGH = Configurable(
    ("seqio.PassThroughVocabulary", "seqio.vocabularies.PassThroughVocabulary"),
    {"size": nothing("the task knows its vocabulary"), "eos_id": only(1, "EOS is T5's")},
)
_VOCABULARY = refers(_SENTENCEPIECE, _BYTES, _PASS_THROUGH)

_SIZES = {
    "vocab_size": field("model.vocab_size", MUST),
    "dtype": field("model.dtype", "float32"),
    "emb_dim": field("model.emb_dim", 512),
    "num_heads": field("model.num_heads", 8),
    "head_dim": field("model.head_dim", 64),
    "mlp_dim": field("model.mlp_dim", 2048),
    "mlp_activations": field("model.mlp_activations", ("relu",), _activations),
    "dropout_rate": field("model.dropout_rate", 0.1),
    "logits_via_embedding": field("model.tied_logits", False),
    "float32_attention_logits": nothing("attention logits are float32 always", False),
}
_T5_CONFIG = Configurable(
    ("t5x.examples.t5.network.T5Config", "t5x.examples.scalable_t5.network.T5Config"),
    {
        **_SIZES,
        "num_encoder_layers": field("model.num_encoder_layers", 6),
        "num_decoder_layers": field("model.num_decoder_layers", 6),
        "scan_layers": field("model.scan_layers"),
        "remat_policy": field("model.remat", convert=_remat),
        "param_scan_axis": nothing("stacked layers are on the first axis", 1),
    },
    {"model.family": "t5_1_1"},
)
_DECODER_CONFIG = Configurable(
    ("t5x.examples.decoder_only.network.TransformerConfig",),
    {**_SIZES, "num_layers": field("model.num_decoder_layers", 6)},
    {"model.family": "lm", "model.num_encoder_layers": 0},
)
_NETWORK = Configurable(
    ("t5x.examples.t5.network.Transformer", "t5x.examples.scalable_t5.network.Transformer"),
    {"config": refers(_T5_CONFIG)},
)
_DECODER_NETWORK = Configurable(
    ("t5x.examples.decoder_only.network.DecoderWrapper",), {"config": refers(_DECODER_CONFIG)}
)
_MODEL = {
    "optimizer_def": refers(_ADAFACTOR, _ADAMW, _LION),
    "label_smoothing": field("loss.label_smoothing", 0.0),
    "z_loss": field("loss.z_loss", 0.0),
    "loss_normalizing_factor": take(_normalizer),
    "decode_fn": nothing(NO_DECODING),
    "feature_converter_cls": only(None, _OWN_CONVERTER),
}
ENCODER_DECODER = Configurable(
    ("t5x.models.EncoderDecoderModel",),
    {
        "module": refers(_NETWORK),
        "input_vocabulary": _VOCABULARY,
        "output_vocabulary": _VOCABULARY,
        "default_decoder_params": nothing(NO_DECODING, None),
        **_MODEL,
    },
)
DECODER_ONLY = Configurable(
    ("t5x.models.DecoderOnlyModel",),
    {
        "module": refers(_DECODER_NETWORK),
        "vocabulary": _VOCABULARY,
        "inputs_bidirectional_attention": keep("bidirectional", bool),
        **_MODEL,
    },
)


KNOWN = (
    *(ENCODER_DECODER, DECODER_ONLY, _NETWORK, _DECODER_NETWORK, _T5_CONFIG, _DECODER_CONFIG),
    *(SCHEDULE, _ADAFACTOR, _FACTOR_RULES, _ADAMW, _LION, _SENTENCEPIECE, _BYTES, _PASS_THROUGH),
)
