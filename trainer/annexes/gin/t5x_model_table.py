"""Maps arguments of T5X's models, optimizers and schedules to our configuration fields.

Source: google-research/t5x: signatures and defaults of `models`, `adafactor`, `optimizers`, `utils`
and the networks of `examples`; seqio for vocabularies, optax for its optimizers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.annexes.gin import translate as m
from trainer.annexes.gin.reader import Reference, Value
from trainer.config import NORMALIZERS
from trainer.model.registry import PER_LAYER

NO_DECODING = "--evaluation.metrics and --evaluation.decoding say what is decoded"

# flax.linen's names for activations -> ours.
_ACTIVATIONS = {"gelu": "gelu", "linear": "linear", "relu": "relu", "silu": "silu", "swish": "silu"}
# T5X's rematerialisation policies -> ours.
_REMAT = {"none": "none", "minimal": "dots", "full": "full"}


def _activations(value: Any) -> Any:
    return tuple(map(_by(_ACTIVATIONS), value)) if isinstance(value, list | tuple) else value


def _by(table: Mapping[Any, str]) -> Callable[[Any], str]:

    def convert(value: Any) -> str:
        for key, ours in table.items():
            if type(value) is type(key) and value == key:
                return ours
        raise ValueError(f"it must be one of {', '.join(map(str, table))}")

    return convert


def none_is(meaning: Any) -> Callable[[Any], Any]:
    """Returns a conversion that replaces None with `meaning`."""
    return lambda value: meaning if value is None else value


def _normalizer(reading: m.Reading, found: Value) -> None:
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
        raise found.must_be("loss_normalizing_factor", f"None, a number or one of {names}")


SCHEDULE = m.configurable(
    "t5x.utils.create_learning_rate_scheduler",
    factors=m.field("optimizer.schedule", "constant * linear_warmup * rsqrt_decay"),
    base_learning_rate=m.field("optimizer.learning_rate", 0.5),
    warmup_steps=m.field("optimizer.warmup_steps", 1000),
    decay_factor=m.field("optimizer.decay_factor"),
    steps_per_decay=m.field("optimizer.steps_per_decay"),
    steps_per_cycle=m.field("optimizer.steps_per_cycle"),
    step_offset=m.only(0, "the schedule counts the run's own steps"),
    min_learning_rate=m.field("optimizer.minimum_learning_rate"),
)
_FACTOR_RULES = m.configurable("t5x.adafactor.standard_logical_factor_rules")
_ADAFACTOR = m.configurable(
    "t5x.adafactor.Adafactor",
    learning_rate=m.nothing("Trainer.learning_rate_fn overrides it", None),
    factored=m.only(True, "raise min_dim_size_to_factor instead"),
    multiply_by_parameter_scale=m.field("optimizer.multiply_by_parameter_scale"),
    beta1=m.field("optimizer.beta1"),
    decay_rate=m.field("optimizer.decay_rate"),
    step_offset=m.field("optimizer.step_offset"),
    clipping_threshold=m.field("optimizer.clipping_threshold", convert=none_is(math.inf)),
    weight_decay_rate=m.field("optimizer.weight_decay"),
    min_dim_size_to_factor=m.field("optimizer.min_dim_size_to_factor"),
    epsilon1=m.field("optimizer.epsilon"),
    epsilon2=m.field("optimizer.minimum_parameter_scale"),
    dtype_momentum=m.only("float32", "moments are always float32"),
    factor_map=m.only(None, "tensors are factored according to their size"),
    logical_factor_rules=m.refers(_FACTOR_RULES, optional=True, default=None),
    weight_decay_rate_lr_exponent=m.field("optimizer.weight_decay_rate_exponent"),
    global_norm_clip_threshold=m.field("optimizer.clip_norm"),
    max_parameter_scale=m.field("optimizer.maximum_parameter_scale"),
    skip_nan_updates=m.only(False, "--on_nan=skip skips whole updates"),
    fields={"optimizer.name": "adafactor"},
)


_WARMUP_COSINE = m.configurable(
    "optax.warmup_cosine_decay_schedule",
    init_value=m.keep("init_value", float, m.MUST),
    peak_value=m.keep("peak_value", float, m.MUST),
    warmup_steps=m.field("optimizer.warmup_steps", m.MUST),
    decay_steps=m.keep("decay_steps", int, m.MUST),
    end_value=m.keep("end_value", float, 0.0),
    exponent=m.only(1.0, "it is half a cosine", 1),
)


def _set_warmup_cosine(reading: m.Reading, found: Value) -> None:
    peak, end, steps = (reading.facts[name] for name in ("peak_value", "end_value", "decay_steps"))
    start, warmup = reading.facts["init_value"], reading.fields["optimizer.warmup_steps"]
    if not peak.value > 0 or type(warmup.value) is not int or steps.value <= warmup.value:
        raise UserError(
            f"{found.origin}: warmup_cosine_decay_schedule needs a peak_value above 0 and more "
            "decay_steps than warmup_steps"
        )
    reading.set("optimizer.schedule", "constant * linear_warmup * cosine_decay", found.origin)
    reading.set("optimizer.learning_rate", *peak)
    reading.set("optimizer.warmup_start", start.value / peak.value, start.origin)
    reading.set("optimizer.final_fraction", end.value / peak.value, end.origin)
    reading.set("optimizer.steps_per_cycle", steps.value - warmup.value, steps.origin)
    reading.set("optimizer.minimum_learning_rate", 0.0, found.origin)


def check_cosine(reading: m.Reading) -> None:
    """Refuses runs longer than an optax cosine: optax's stays at its end value, ours restarts."""
    steps, end = reading.fields.get("train_steps"), reading.facts.get("decay_steps")
    if steps and end and type(steps.value) is int and steps.value > end.value:
        raise UserError(
            f"{end.origin}: decay_steps = {end.value} must be at least the run's {steps.value} "
            f"updates ({steps.origin})"
        )


def _own_rate(reading: m.Reading, found: Value) -> None:
    """Sets a wrapped optax optimizer's rate, for which T5X only logs Trainer.learning_rate_fn."""
    if isinstance(found.value, Reference):
        reading.follow("learning_rate", found, (SCHEDULE, _WARMUP_COSINE))
        if found.value.name.rpartition(".")[2] == _WARMUP_COSINE.short:
            _set_warmup_cosine(reading, found)
    else:
        reading.set("optimizer.schedule", "constant", found.origin)
        reading.set("optimizer.learning_rate", found.value, found.origin)


def _optax(name: str, b2: float, weight_decay: float, **more: m.Argument) -> m.Configurable:
    return m.configurable(
        f"t5x.optimizers.{name}",
        f"optax.{name}",
        learning_rate=m.take(_own_rate, m.MUST),
        b1=m.field("optimizer.beta1", 0.9),
        b2=m.field("optimizer.beta2", b2),
        weight_decay=m.field("optimizer.weight_decay", weight_decay),
        mu_dtype=m.only(None, "moments are float32"),
        mask=m.only(None, "set --optimizer.no_weight_decay instead"),
        **more,
        # Without a mask, optax decays every tensor.
        fields={"optimizer.name": name, "optimizer.no_weight_decay": ()},
    )


_ADAMW = _optax(
    "adamw",
    b2=0.999,
    weight_decay=1e-4,
    eps=m.field("optimizer.epsilon", 1e-8),
    eps_root=m.only(0.0, "only 0 is supported"),
    nesterov=m.only(False, "Nesterov momentum is not supported"),
)
_LION = _optax("lion", b2=0.99, weight_decay=1e-3)

_CLIP = m.configurable("optax.clip", max_delta=m.field("optimizer.clip_value", m.MUST))
_CLIP_NORM = m.configurable(
    "optax.clip_by_global_norm", max_norm=m.field("optimizer.clip_norm", m.MUST)
)


def _transformations(reading: m.Reading, found: Value) -> None:
    """Reads the parts of a chain: at most one gradient clipping, then an optimizer."""
    parts = found.value if isinstance(found.value, list | tuple) else ()
    if len(parts) not in (1, 2) or isinstance(found.value, Reference):
        rule = "an optimizer, or @optax.clip() or @optax.clip_by_global_norm() and an optimizer"
        raise found.must_be("chain.transformations", rule)
    for part in parts[:-1]:
        reading.follow("chain.transformations", found._replace(value=part), (_CLIP, _CLIP_NORM))
    last = found._replace(value=parts[-1])
    reading.follow("the last of chain.transformations", last, (_ADAMW, _LION))


_CHAIN = m.configurable("t5x.optimizers.chain", transformations=m.take(_transformations, m.MUST))

_SENTENCEPIECE = m.configurable(
    "seqio.SentencePieceVocabulary",
    "seqio.vocabularies.SentencePieceVocabulary",
    sentencepiece_model_file=m.field("vocabulary.model_file", m.MUST),
    extra_ids=m.field("vocabulary.extra_ids"),
    normalizer_spec_overrides=m.only(None, "pipeline.build normalizes as the model does"),
    reverse_extra_ids=m.only(True, "sentinels descend from the last id"),
    use_fast_tokenizer=m.nothing("the tokenizer is fast and gives SentencePiece's ids", False),
)
_BYTES = m.configurable(
    "seqio.ByteVocabulary",
    "seqio.vocabularies.ByteVocabulary",
    extra_ids=m.field("vocabulary.extra_ids"),
)
_PASS_THROUGH = m.configurable(
    "seqio.PassThroughVocabulary",
    "seqio.vocabularies.PassThroughVocabulary",
    size=m.nothing("the task knows its vocabulary"),
    eos_id=m.only(1, "EOS is T5's"),
)
_VOCABULARY = m.refers(_SENTENCEPIECE, _BYTES, _PASS_THROUGH)

_SIZES = {
    "vocab_size": m.field("model.vocab_size", m.MUST),
    "dtype": m.field("model.dtype", "float32"),
    "emb_dim": m.field("model.emb_dim", 512),
    "num_heads": m.field("model.num_heads", 8),
    "head_dim": m.field("model.head_dim", 64),
    "mlp_dim": m.field("model.mlp_dim", 2048),
    "mlp_activations": m.field("model.mlp_activations", ("relu",), _activations),
    "dropout_rate": m.field("model.dropout_rate", 0.1),
    "logits_via_embedding": m.field("model.tied_logits", False),
    "float32_attention_logits": m.field(
        "model.softmax_dtype", convert=_by({True: "float32", False: "auto"})
    ),
}
_LAYERS = {
    "num_encoder_layers": m.field("model.num_encoder_layers", 6),
    "num_decoder_layers": m.field("model.num_decoder_layers", 6),
    "scan_layers": m.field("model.scan_layers"),
    "remat_policy": m.field("model.remat", convert=_by(_REMAT)),
    "param_scan_axis": m.nothing("layers are stacked along axis 1, as in T5X", 1),
}
_T5_CONFIG = m.configurable(
    "t5x.examples.t5.network.T5Config", **_SIZES, **_LAYERS, fields={"model.family": "t5_1_1"}
)
_SCALABLE_CONFIG = m.configurable(
    "t5x.examples.scalable_t5.network.T5Config",
    **_SIZES,
    **_LAYERS | {"scan_layers": m.field("model.scan_layers", True)},
    fields={"model.family": "t5_1_1", "model.position": PER_LAYER},
)
_DECODER_CONFIG = m.configurable(
    "t5x.examples.decoder_only.network.TransformerConfig",
    **_SIZES,
    num_layers=m.field("model.num_decoder_layers", 6),
    fields={"model.family": "lm", "model.num_encoder_layers": 0},
)
_NETWORK = m.configurable("t5x.examples.t5.network.Transformer", config=m.refers(_T5_CONFIG))
_SCALABLE_NETWORK = m.configurable(
    "t5x.examples.scalable_t5.network.Transformer", config=m.refers(_SCALABLE_CONFIG)
)
_DECODER_NETWORK = m.configurable(
    "t5x.examples.decoder_only.network.DecoderWrapper", config=m.refers(_DECODER_CONFIG)
)
_MODEL = {
    "optimizer_def": m.refers(_ADAFACTOR, _ADAMW, _LION, _CHAIN),
    "label_smoothing": m.field("loss.label_smoothing", 0.0),
    "z_loss": m.field("loss.z_loss", 0.0),
    "loss_normalizing_factor": m.take(_normalizer),
    "decode_fn": m.nothing(NO_DECODING),
    "feature_converter_cls": m.only(None, "the converter follows from the architecture"),
}
ENCODER_DECODER = m.configurable(
    "t5x.models.EncoderDecoderModel",
    module=m.refers(_NETWORK, _SCALABLE_NETWORK),
    input_vocabulary=_VOCABULARY,
    output_vocabulary=_VOCABULARY,
    default_decoder_params=m.nothing(NO_DECODING, None),
    **_MODEL,
)
DECODER_ONLY = m.configurable(
    "t5x.models.DecoderOnlyModel",
    module=m.refers(_DECODER_NETWORK),
    vocabulary=_VOCABULARY,
    inputs_bidirectional_attention=m.keep("bidirectional", bool),
    **_MODEL,
)


KNOWN = (
    *(ENCODER_DECODER, DECODER_ONLY, _NETWORK, _DECODER_NETWORK, _T5_CONFIG, _DECODER_CONFIG),
    *(_SCALABLE_NETWORK, _SCALABLE_CONFIG, _CHAIN, _CLIP, _CLIP_NORM, _WARMUP_COSINE),
    *(SCHEDULE, _ADAFACTOR, _FACTOR_RULES, _ADAMW, _LION, _SENTENCEPIECE, _BYTES, _PASS_THROUGH),
)
