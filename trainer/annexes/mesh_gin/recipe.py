"""Translates gin files of Mesh T5, the T5 library before T5X, and of Primer.

Layers, norms and activations determine the model's preset; sizes in files override the preset's.

Source: tensorflow/mesh `transformer/`; google-research/text-to-text-transfer-transformer; Primer,
google-research/google-research `primer/`.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tasks import registry
from tasks.objectives import (
    DENOISING,
    Denoising,
    prefix_lm,
    span_corruption,
    span_corruption_lengths,
)
from tasks.objectives.denoising import SIDES
from tasks.objectives.masks import IidTokens, Mask, RandomPrefix, RandomSpans, RegularSpans
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rejected
from tasks.terminal.programs import program
from trainer.annexes.gin.reader import Binding, Reference, Statements, Value
from trainer.annexes.gin.translate import Reading, is_size
from trainer.annexes.mesh_gin import includes, tables
from trainer.annexes.mesh_gin.includes import DESCRIPTIONS as DESCRIPTIONS
from trainer.annexes.mesh_gin.tables import ATTENTION, MLP, NORMS
from trainer.config.presets import MODEL_PRESETS

_ACTIVATIONS = {name: name for name in ("gelu", "linear", "relu", "silu", "squared_relu")}
_ACTIVATIONS["swish"] = "silu"
# Prefixes of task names in T5, in Primer and here.
_FAMILIES = ("c4", "lm1b", "pg19")
# Preprocessors of language models, and alternatives that give `denoise` windows of equal length.
# Joining short documents first makes no difference, since caches join all documents.
_FIRST, _JOINS = "select_random_chunk", "reduce_concat_tokens"
_LANGUAGE_MODEL = (_FIRST, _JOINS, "split_tokens_to_targets_length")
_SPLITS = ("split_tokens", "split_tokens_to_inputs_length")
# T5's noise masks -> ours; and our fields -> T5's arguments, where names differ.
_MASKS: Mapping[str, Callable[..., Mask]] = {
    "random_spans_noise_mask": RandomSpans,
    "regular_noise_mask": RegularSpans,
    "iid_noise_mask": IidTokens,
    "random_prefix_noise_mask": RandomPrefix,
}
_ARGUMENTS = {"shortest": "min_span_length", "longest": "max_span_length"}
# T5's names for parts of C4 -> the Hub's; None if the Hub lacks it.
_PARTS_OF_C4 = {"noclean": "en.noclean", "realnewslike": "realnewslike", "webtextlike": None}
# Keys of `denoise`'s arguments in `facts`.
_BOUND = ("noise_mask_fn", "inputs_fn", "targets_fn")
_NAME_IT = "name a task with --task"
# Keys of a model's layers in `facts`, which a preset overrides.
_OF_MODEL = (
    *("layers", "num_layers", "layer_stack_cls", "ineffective", "norm", "last_norm", "use_bias"),
    *("activations", "share_qk", "num_experts", "expert_activations", "loss_on_targets_only"),
)
# T5's defaults for spans.
_SPANS = {"noise_density": 0.15, "mean_noise_span_length": 3.0}
_PLAIN, _MDHA = (ATTENTION, MLP), ("MDHA", MLP)
_SWITCH = (*_PLAIN * 3, ATTENTION, "MoE1D")
_EVOLVED = ("DoubleHeadsAttentionLayer", "DecoderConvolutionalLayer", *_PLAIN)
_SYNTHESIZER = ("Synthesizer", MLP)
_SWITCH_PRIMER = (*_MDHA * 3, "MDHA", "MoE1D")
# (layers, activations, norm, shared queries and keys or not) -> Primer preset.
_KINDS = {
    (_PLAIN, ("relu",), "layer", False): "medium_transformer_vanilla",
    (_PLAIN, ("gelu",), "layer", False): "medium_transformer_gelu",
    (_PLAIN, ("silu",), "layer", False): "medium_transformer_swish",
    (_PLAIN, ("squared_relu",), "layer", False): "medium_transformer_squared_relu",
    (_PLAIN, ("relu", "linear"), "layer", False): "medium_transformer_reglu",
    (_PLAIN, ("silu", "linear"), "layer", False): "medium_transformer_swiglu",
    (_PLAIN, ("silu", "linear"), "rms", False): "medium_transformer_plusplus",
    (_MDHA, ("relu",), "layer", False): "medium_transformer_mdha",
    (_MDHA, ("squared_relu",), "layer", False): "medium_primer_ez",
    (_MDHA, ("squared_relu",), "prime", True): "medium_primer_as_released",
    (_EVOLVED, ("silu",), "layer", False): "medium_evolved_transformer",
    (_SWITCH, ("relu",), "layer", False): "switch_transformer",
    (_SWITCH_PRIMER, ("squared_relu",), "layer", False): "switch_primer",
    (_SYNTHESIZER, ("relu",), "layer", False): "synthesizer",
    (_SYNTHESIZER, ("squared_relu",), "layer", False): "synthesizer_squared_relu",
}


def is_written_in(selectors: set[str]) -> bool:
    """Returns whether files that bind these selectors are Mesh T5's rather than T5X's."""
    return any(name.rpartition(".")[2] in ("run", "make_layer_stack") for name in selectors)


def read(statements: Statements, preset: str | None, has_task: bool) -> tuple[Reading, str]:
    """Returns (what the files mean, the model's preset); `has_task` if --task names the task.

    A given `preset` overrides the files' model and sizes.
    """
    _refuse_evaluation(statements.bindings)
    statements.bindings[:0] = includes.DEFAULTS
    reading = Reading(statements, tables.KNOWN)
    reading.everything(("", "encoder", "decoder"))
    preset = _understand(reading, preset)
    reading.facts["task"] = _task(reading, has_task)
    reading.finish(tables.MACROS)
    return reading, preset


def _refuse_evaluation(bindings: Iterable[Binding]) -> None:
    """Raises UserError if files and flags describe a command other than training."""
    for binding in bindings:
        name = f"{binding.selector.rpartition('.')[2]}.{binding.argument}"
        if name == "run.mode" and binding.value in ("eval", "perplexity_eval", "infer", "export"):
            raise UserError(
                f"{binding.place}: run.mode = {binding.value!r}: this command trains; "
                f"evaluate with {program('trainer.evaluate')} --model_dir=DIR --steps=all "
                f"--split=validation, and export with {program('trainer.export')}"
            )


def _understand(reading: Reading, preset: str | None) -> str:
    """Sets the fields that depend on several bindings; returns the model's preset."""
    reading.set("loss.normalizer", "num_total_target_tokens", "Mesh T5's loss")
    if "checkpoint.keep" not in reading.fields:
        reading.set("checkpoint.keep", None, "Mesh T5's default")
    optimizer = reading.facts.get("optimizer")
    if optimizer and _short(optimizer.value) != "AdafactorOptimizer":
        raise optimizer.must_be("optimizer", "@AdafactorOptimizer here")
    _set_schedule(reading)
    _set_lengths_and_rows(reading)
    if not preset:
        return _set_model(reading)
    reading.facts.used |= {
        f"{stack}{fact}" for stack in ("", "encoder/", "decoder/") for fact in _OF_MODEL
    }
    for path in [path for path in reading.fields if path.startswith("model.")]:
        if path not in ("model.dtype", "model.dropout_rate"):
            del reading.fields[path]
    return preset


def _set_model(reading: Reading) -> str:
    kind = reading.facts.get("model_type", Value("bitransformer", "Mesh T5's default"))
    activations = _activations(reading)
    layers = reading.facts["num_layers"]
    norm = _norm(reading)
    biased = _value(reading, "use_bias", False)
    reading.set("model.mlp_activations", activations.value, activations.origin)
    if kind.value == "bitransformer":
        _refuse_other_layers(reading)
        if norm.value != "rms" or biased:
            raise UserError(
                f"{norm.origin}: an encoder-decoder of Mesh T5 must have RMS norms and no biases"
            )
        for stack in ("encoder", "decoder"):
            here = reading.facts.get(f"{stack}/num_layers", layers)
            reading.set(f"model.num_{stack}_layers", *here)
        tied = reading.fields["model.tied_logits"].value
        return "t5_1_0_base" if tied else "t5_1_1_base"
    if kind.value != "lm":
        raise kind.must_be("model_type", "'lm' or 'bitransformer'")
    targets_only = reading.facts.get("loss_on_targets_only")
    if targets_only and targets_only.value:
        raise UserError(f"{targets_only.origin}: loss_on_targets_only must be False for an LM")
    if norm.value == "rms" and not biased:
        reading.set("model.num_decoder_layers", *layers)
        return "lm_base"
    return _set_primer(reading, activations, norm, layers)


def _refuse_other_layers(reading: Reading) -> None:
    for stack, names in (
        ("encoder", (ATTENTION, MLP)),
        ("decoder", (ATTENTION, "EncDecAttention", MLP)),
    ):
        reading.facts.used.add(f"{stack}/full_attention")  # language models alone read it
        bound = reading.facts.get(f"{stack}/layers")
        if bound and tuple(map(_short, bound.value)) != names:
            rule = f"{', '.join(f'@{name}' for name in names)} in an encoder-decoder"
            raise bound.must_be(f"{stack}/make_layer_stack.layers", rule)


def _set_primer(reading: Reading, activations: Value, norm: Value, layers: Value) -> str:
    found = reading.facts["layers"]
    names = tuple(_short(each) for each in found.value)
    shared = _value(reading, "share_qk", False)
    preset = _KINDS.get((names, activations.value, norm.value, shared))
    stack = reading.facts.get("layer_stack_cls")
    if stack and _short(stack.value) == "PrePostNormLayerStack":
        # Unlike Unitransformer.layer_stack, this argument takes effect in Mesh TensorFlow.
        preset = {"medium_primer_as_released": "medium_primer"}.get(str(preset))
    if preset is None or preset not in MODEL_PRESETS:
        what = f"{preset}, " if preset else ""
        raise UserError(
            f"{found.origin}: there is no preset of this kind of model ({what}layers "
            f"{', '.join(dict.fromkeys(names))}; activations {', '.join(activations.value)}; norm "
            f"{norm.value}): set --preset and leave out the model's files"
        )
    attentions = sum(name in (ATTENTION, "MDHA", "Synthesizer") for name in names)
    # An evolved block counts as one layer; other patterns repeat.
    repeats = 1 if names == _EVOLVED else attentions
    reading.set("model.num_decoder_layers", layers.value * repeats, layers.origin)
    if names == _SYNTHESIZER:
        # Mesh's files bind SelfAttention's heads; a Synthesizer has separate ones.
        for path in ("model.num_heads", "model.head_dim"):
            reading.fields.pop(path, None)
    if "MoE1D" in names:
        experts = _activations(reading, "expert_activations")
        if experts.value != activations.value:
            raise UserError(f"{experts.origin}: experts must have the other layers' activations")
        if "num_experts" in reading.facts:
            count, origin = reading.facts["num_experts"]
            reading.set("model.feed_forward", f"switch:experts={count}", origin)
    if "ineffective" in reading.facts:
        where = reading.facts["ineffective"].origin
        reading.warn(
            f"Unitransformer.layer_stack ({where}) has no effect in Mesh TensorFlow, whose own "
            "argument overrides it: norms precede sublayers, as in the released models; for the "
            "paper's alternating norms, use the preset medium_primer"
        )
    reading.fields.pop("model.mlp_activations")
    reading.fields.pop("model.tied_logits", None)
    return preset


def _norm(reading: Reading) -> Value:
    """Returns the layers' norm, which must also be the final norm."""
    layers, last = reading.facts.get("norm"), reading.facts.get("last_norm")
    norms = {
        NORMS[name]
        for found in (layers, last)
        if found
        for each in found.value
        if (name := _short(each)) in NORMS
    }
    if layers is None:
        norms.add("rms")
    if len(norms) != 1:
        where = ", ".join(found.origin for found in (layers, last) if found)
        raise UserError(f"{where}: layers and stack must have one norm, not {len(norms)}")
    return Value(norms.pop(), layers.origin if layers else "Mesh T5's default")


def _activations(reading: Reading, name: str = "activations") -> Value:
    found = reading.facts.get(name, Value("relu", "Mesh T5's default"))
    names = [found.value] if isinstance(found.value, str) else found.value
    known = isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)
    if not known or not set(names) <= set(_ACTIVATIONS):
        raise found.must_be("activation", f"among {', '.join(_ACTIVATIONS)}")
    return Value(tuple(_ACTIVATIONS[each] for each in names), found.origin)


def _set_schedule(reading: Reading) -> None:
    found = reading.facts["schedule"]
    name = _short(found.value)
    if name == "constant_learning_rate":
        rate = reading.facts.get("constant_rate")
        if rate is None:
            raise UserError(f"{found.origin}: set constant_learning_rate.learning_rate")
        reading.set("optimizer.schedule", "constant", found.origin)
        reading.set("optimizer.learning_rate", *rate)
        reading.fields.pop("optimizer.warmup_steps", None)
        return
    if name != "learning_rate_schedule_noam":
        rule = "@learning_rate_schedule_noam or @constant_learning_rate"
        raise found.must_be("learning_rate_schedule", rule)
    steps = reading.fields.get("train_steps", Value(None, found.origin))
    fraction = reading.facts.get("linear_decay_fraction", Value(0.1, "Mesh T5's default"))
    schedule = "constant * rsqrt_decay"
    if fraction.value:
        if type(steps.value) is not int or steps.value < 1:
            raise UserError(
                f"{steps.origin}: linear_decay_fraction = {fraction.value} ({fraction.origin}) is "
                "a share of utils.run.train_steps, which must be 1 or more: set it"
            )
        cooldown = max(1, round(steps.value * fraction.value))
        origin = f"{fraction.origin}, {steps.origin}"
        schedule += " * linear_cooldown"
        reading.set("optimizer.cooldown_start", steps.value - cooldown, origin)
        reading.set("optimizer.cooldown_steps", cooldown, origin)
    reading.set("optimizer.schedule", schedule, found.origin)


def _set_lengths_and_rows(reading: Reading) -> None:
    lengths = reading.facts["lengths"]
    sizes = dict(lengths.value) if isinstance(lengths.value, dict) else {}
    if _short(sizes.get("targets")) == "random_spans_targets_length":
        spans = [_value(reading, name, default) for name, default in _SPANS.items()]
        if type(sizes.get("inputs")) is not int or not 0 < spans[0] < 1 or not spans[1] > 0:
            places = [found.origin for name in _SPANS if (found := reading.facts.get(name))]
            raise UserError(
                f"{', '.join([*places, lengths.origin])}: the targets' length cannot be computed "
                f"from inputs of {sizes.get('inputs')!r}, a noise_density of {spans[0]} and a "
                f"mean_noise_span_length of {spans[1]}"
            )
        sizes["targets"] = span_corruption_lengths(sizes["inputs"], *spans)[1]
        lengths = reading.facts["lengths"] = Value(sizes, lengths.origin)
    if not sizes or not all(map(is_size, sizes.values())):
        raise lengths.must_be("sequence_length", "lengths: {'inputs': 512, 'targets': 114}")
    decoder_only = _value(reading, "model_type", "") == "lm"
    for side, size in sizes.items():
        # Mesh requires an input length even for language models, which have no inputs.
        if side == "targets" or not decoder_only:
            reading.set(f"lengths.{side}", size, lengths.origin)
    default = Value(("tokens_per_replica", 2048), "Mesh T5's default")
    found = reading.facts.get("batch_size", default)
    rows = found.value
    if isinstance(rows, list | tuple) and len(rows) == 2 and type(rows[1]) is int:
        unit, number = rows
        tokens = {"sequences_per_batch": 1, "tokens_per_batch": max(sizes.values())}.get(
            str(unit), 0
        )
        if tokens and number % tokens == 0:
            reading.set("batch_size", number // tokens, found.origin)
            return
    raise found.must_be(
        "batch_size",
        "('sequences_per_batch', ROWS) or ('tokens_per_batch', a multiple of the longest "
        "sequence): tokens per replica depend on the machine",
    )


def _task(reading: Reading, named: bool) -> Value:
    """Returns our task with the bound corpus and objective, or else the task named in the files.

    If `named`, a flag names the task and the bound objective is ignored.
    """
    name = reading.facts.get("task")
    if name is None:
        raise UserError(
            "none of these files sets mesh_train_dataset_fn.mixture_or_task_name: add "
            "dataset.gin, and --gin.MIXTURE_NAME=\"'NAME'\""
        )
    steps = reading.facts.get("preprocessors")
    full = reading.facts.get("full_attention")
    if _value(reading, "model_type", "") == "lm" and full and not full.value:
        reading.warn(
            f"input_full_attention = False ({full.origin}): if the task has inputs, a decoder sees "
            "them in both directions here, and only targets have a loss"
        )
    if named or steps is None or not isinstance(steps.value, list | tuple):
        return name
    family, _, rest = str(name.value).partition("_")
    if family not in _FAMILIES:
        reading.warn(
            f"unsupervised.preprocessors ({steps.origin}) has no effect: {name.value} has "
            "its own preprocessors"
        )
        return name
    part = rest.partition("_")[0]
    if family == "c4" and part in _PARTS_OF_C4:
        there = _PARTS_OF_C4[part]
        advice = f"--corpus=hf:allenai/c4:{there}" if there else "a --corpus of your own"
        reading.warn(f"{name.value} ({name.origin}) is a part of C4: build its cache with {advice}")
    prefix = f"{family}_"
    known = [each.removeprefix(prefix) for each in registry.names() if each.startswith(prefix)]
    found = _objective(reading, steps, known)
    return Value(f"{prefix}{found}", f"{name.origin}, {steps.origin}")


def _objective(reading: Reading, steps: Value, known: Collection[str]) -> str:
    names = tuple(_short(each) for each in steps.value)
    if names == _LANGUAGE_MODEL:
        return "autoregressive_lm"
    rest = [name for name in names if name != _JOINS]
    if len(rest) != 3 or rest[0] != _FIRST or rest[1] not in _SPLITS or rest[2] != "denoise":
        listed = (_FIRST, _JOINS, *_SPLITS, "denoise")
        other = [name for name in names if name not in listed]
        found = f"{', '.join(other)} is not supported" if other else "this order is not supported"
        raise UserError(
            f"{steps.origin}: {found}: the objective must be denoising or language modelling, "
            f"with unsupervised.preprocessors {', '.join(listed)}; or {_NAME_IT}"
        )
    if _value(reading, "model_type", "") == "lm":
        raise UserError(
            f"{reading.facts['model_type'].origin}, {steps.origin}: a decoder-only model needs the "
            f"language modelling objective, objectives/lm.gin, not denoising; or {_NAME_IT}"
        )
    wanted = _denoising(reading, steps)
    plain = {**DENOISING, "span_corruption": span_corruption(), "prefix_lm": prefix_lm()}
    settings = {
        name: changes
        for name, like in reversed(plain.items())
        if name in known and (changes := _mask_settings(wanted, like)) is not None
    }
    if not settings:
        places = [reading.facts[each].origin for each in _BOUND if each in reading.facts]
        own = [place for place in places if not place.endswith("(built in)")]
        raise UserError(
            f"{', '.join(own or [steps.origin])}: the objective must be one of "
            f"{', '.join(plain)}: here inputs are {wanted.inputs} and targets "
            f"{wanted.targets} of {type(wanted.mask).__name__}: {_NAME_IT}"
        )
    name = min(settings, key=lambda each: len(settings[each]))
    if settings[name]:
        reading.set("objective", settings[name], steps.origin)
    return name


def _denoising(reading: Reading, steps: Value) -> Denoising:
    mask = reading.facts.get("noise_mask_fn", Value(None, steps.origin))
    if _short(mask.value) not in _MASKS:
        raise mask.must_be("denoise.noise_mask_fn", f"{_any_of(_MASKS)}: {_NAME_IT}")
    kind: Any = _MASKS[_short(mask.value)]
    values = {
        field.name: reading.facts[theirs].value
        for field in dataclasses.fields(kind)
        if (theirs := _ARGUMENTS.get(field.name, field.name)) in reading.facts
    }
    sides = {}
    for function in ("inputs_fn", "targets_fn"):
        bound = reading.facts.get(function, Value(None, steps.origin))
        side = "all" if bound.value is None else _short(bound.value)
        if side not in SIDES:
            known = _any_of(each for each in SIDES if each != "all")
            raise bound.must_be(f"denoise.{function}", f"{known}: {_NAME_IT}")
        sides[function.removesuffix("_fn")] = side
    try:
        return Denoising(kind(**values), **sides)
    except Rejected as error:
        raise UserError(f"{mask.origin}: noise_mask_fn: {error}") from error


def _mask_settings(wanted: Denoising, like: Denoising) -> tuple[str, ...] | None:
    """Returns the settings that turn `like` into `wanted`; None if more than numbers differ."""
    if dataclasses.replace(wanted, mask=like.mask) != like:
        return None
    if type(wanted.mask) is not type(like.mask):
        return None
    one, other = (vars(each.mask) for each in (wanted, like))
    return tuple(f"mask.{name}={one[name]}" for name in one if one[name] != other[name])


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(f"@{name}" for name in names)


def _value(reading: Reading, name: str, default: Any) -> Any:
    return reading.facts[name].value if name in reading.facts else default


def _short(value: Any) -> str:
    return value.name.rpartition(".")[2] if isinstance(value, Reference) else repr(value)
