"""What the arguments of T5X's configurables mean for us.

Source: google-research/t5x: signatures and defaults of `train.train`, `utils`, `models`,
`adafactor`, `partitioning`, `trainer` and the networks of `examples`; seqio and optax for theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tasks.command_line import UserError
from trainer.config import NORMALIZERS
from trainer.gin.meaning import (
    MUST,
    Argument,
    Configurable,
    Reading,
    field,
    nothing,
    only,
    refers,
    shown,
    take,
)
from trainer.gin.reader import Reference, Value

# flax.linen's names of activations -> ours.
_ACTIVATIONS = {"gelu": "gelu", "linear": "linear", "relu": "relu", "silu": "silu", "swish": "silu"}
# T5X's names of a layer's rematerialisation -> ours.
_REMAT = {"none": "none", "minimal": "dots", "full": "full"}


def _activations(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    for name in value:
        if name not in _ACTIVATIONS:
            raise ValueError(f"the activations are {', '.join(_ACTIVATIONS)}")
    return tuple(_ACTIVATIONS[name] for name in value)


def _remat(value: Any) -> str:
    if value not in _REMAT:
        raise ValueError(f"it must be one of {', '.join(_REMAT)}")
    return _REMAT[value]


def _or(meaning: Any) -> Callable[[Any], Any]:
    """What None stands for."""
    return lambda value: meaning if value is None else value


def _microbatches(reading: Reading, found: Value) -> None:
    reading.set("microbatches", found.value or 1, found.origin)


def _lengths(reading: Reading, found: Value) -> None:
    lengths = found.value if isinstance(found.value, dict) else {"": 0}
    known = set(lengths) <= {"inputs", "targets"}
    if not known or not all(type(length) is int for length in lengths.values()):
        raise UserError(
            f"{found.origin}: task_feature_lengths = {shown(found.value)} must be lengths of "
            "inputs and targets, {'inputs': 512, 'targets': 114}"
        )
    for side, length in lengths.items():
        reading.set(f"lengths.{side}", length, found.origin)
    reading.facts["lengths"] = found


def _task(reading: Reading, found: Value) -> None:
    if not isinstance(found.value, str):
        raise UserError(
            f"{found.origin}: mixture_or_task_name = {shown(found.value)} must be a name"
        )
    reading.facts["task"] = found


def _same(fact: str, what: str) -> Argument:
    """An argument of the evaluation's data that the training's has too."""

    def check(reading: Reading, found: Value) -> None:
        trained = reading.facts.get(fact)
        if trained and found.value not in (trained.value, None):
            raise UserError(
                f"{found.origin}: the evaluation's {what} {shown(found.value)} is another than the "
                f"training's {shown(trained.value)} ({trained.origin}): here both are the same"
            )

    return take(check)


def _remember(fact: str) -> Argument:
    """An argument whose meaning depends on others."""

    def note(reading: Reading, found: Value) -> None:
        reading.facts[fact] = found

    return take(note)


def _module(reading: Reading, found: Value) -> None:
    if found.value is not None:
        reading.warn(
            f"module = {shown(found.value)} ({found.origin}) is not imported: code is loaded by "
            f"--task_module={found.value} alone"
        )


def _save(reading: Reading, found: Value) -> None:
    if found.value is not None:
        reading.follow("CheckpointConfig.save", found, (_SAVE,))
        return
    reading.set("checkpoint.every_steps", 0, found.origin)
    reading.warn(f"save = None ({found.origin}): the last state is saved all the same")


def _relative_steps(reading: Reading, found: Value) -> None:
    if found.value is None:
        return
    if "init_from" in reading.fields:
        raise UserError(
            f"{found.origin}: relative_steps = {shown(found.value)} with a checkpoint to start "
            "from: give total_steps, those of the checkpoint included"
        )
    reading.set("train_steps", found.value, found.origin)


def _stats_period(reading: Reading, found: Value) -> None:
    if found.value is not None:
        reading.set("metrics.every_steps", found.value, found.origin)


def _no_evaluation(reading: Reading, found: Value) -> None:
    if found.value is None:
        reading.set("evaluation.every_steps", 0, found.origin)
    else:
        reading.follow("train.train_eval_dataset_cfg", found, (_EVALUATION,))


def _restore_path(reading: Reading, found: Value) -> None:
    paths = [found.value] if isinstance(found.value, str) else found.value
    if not paths:
        return
    if not isinstance(paths, list | tuple) or len(paths) > 1 or not isinstance(paths[0], str):
        raise UserError(
            f"{found.origin}: RestoreCheckpointConfig.path = {shown(found.value)} must be the path "
            "of one checkpoint, or []"
        )
    reading.set("init_from", paths[0], found.origin)


def _restore_mode(reading: Reading, found: Value) -> None:
    # The newest of a folder or a checkpoint itself: --init_from sees which it is.
    if found.value not in ("specific", "latest"):
        raise UserError(
            f"{found.origin}: mode = {shown(found.value)} must be 'specific' or 'latest': all "
            "checkpoints of a folder are evaluated by trainer.evaluate --checkpoints=all"
        )


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


def _submesh(reading: Reading, found: Value) -> None:
    if found.value is None:
        return
    sizes = found.value
    if not isinstance(sizes, list | tuple) or not all(type(size) is int for size in sizes):
        raise UserError(
            f"{found.origin}: model_parallel_submesh = {shown(sizes)} must be four sizes or None"
        )
    # T5X's own rule: it goes before num_partitions, which is its product.
    reading.set("mesh.num_partitions", math.prod(sizes), found.origin)
    reading.warn(
        f"of model_parallel_submesh = {shown(sizes)} ({found.origin}) the number of devices holds, "
        f"{math.prod(sizes)}; which of them, the mesh decides"
    )


def _parameter_dims(reading: Reading, found: Value) -> None:
    if found.value not in (1, 2):
        raise UserError(
            f"{found.origin}: parameter_partitioning_dims = {shown(found.value)} must be 1 or 2"
        )
    if found.value == 2:
        # T5X divides the embedding's axis over "data", which is what our "fsdp" does.
        reading.set("mesh.data", 1, found.origin)
        reading.set("mesh.fsdp", -1, found.origin)


_HARDWARE = "random numbers are JAX's threefry, the same on all hardware"
_AS_TRAINED = "a checkpoint holds the state as it is trained, in float32"
_STEP_IS_STATE = "the place in the data is the step, which every checkpoint has"
_NO_DECODING = "no text is decoded during pretraining"
_WHOLE = "the checkpoint's parameters are taken whole"
_ORBAX = "checkpoints are Orbax's, asynchronous, whole or absent"
_MESH = "set --mesh.data, --mesh.fsdp and --mesh.tensor"
_OWN_METRICS = "config.json, metrics.jsonl and TensorBoard are written always"
_OWN_CONVERTER = "the model's stacks choose the converter"

_RULES = Configurable(
    ("t5x.partitioning.standard_logical_axis_rules",),
    {
        "activation_partitioning_dims": nothing("the compiler divides activations", 1),
        "parameter_partitioning_dims": take(_parameter_dims),
        "additional_rules": only(None, "--mesh.rules has the tables that there are"),
    },
)
_PARTITIONER = Configurable(
    ("t5x.partitioning.PjitPartitioner",),
    {
        "num_partitions": field("mesh.num_partitions", convert=_or(1)),
        "model_parallel_submesh": take(_submesh),
        "logical_axis_rules": refers(_RULES, default=None),
        "params_on_devices": only(True, "parameters are on the devices"),
        "backend": only(None, "choose by the environment variable JAX_PLATFORMS"),
        "ici_mesh_shape": only(None, _MESH),
        "dcn_mesh_shape": only(None, _MESH),
    },
)

_SCHEDULE = Configurable(
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
        "clipping_threshold": field("optimizer.clipping_threshold", convert=_or(math.inf)),
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
        reading.follow("learning_rate", found, (_SCHEDULE,))
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
    "decode_fn": nothing(_NO_DECODING),
    "feature_converter_cls": only(None, _OWN_CONVERTER),
}
_ENCODER_DECODER = Configurable(
    ("t5x.models.EncoderDecoderModel",),
    {
        "module": refers(_NETWORK),
        "input_vocabulary": _VOCABULARY,
        "output_vocabulary": _VOCABULARY,
        "default_decoder_params": nothing(_NO_DECODING, None),
        **_MODEL,
    },
)
_DECODER_ONLY = Configurable(
    ("t5x.models.DecoderOnlyModel",),
    {
        "module": refers(_DECODER_NETWORK),
        "vocabulary": _VOCABULARY,
        "inputs_bidirectional_attention": _remember("bidirectional"),
        **_MODEL,
    },
)

_TRAINING_DATA = {
    "mixture_or_task_name": take(_task, MUST),
    "task_feature_lengths": take(_lengths, MUST),
    "split": only("train", "training reads the split train"),
    "batch_size": field("batch_size", MUST),
    "shuffle": _remember("shuffle"),
    "seed": _remember("data_seed"),
    "use_cached": _remember("use_cached"),
    "pack": _remember("pack"),
    "module": take(_module),
    "use_custom_packing_ops": nothing("rows are the same", False),
    "use_memory_cache": nothing("batches of the evaluation are made anew", True),
    "trim_output_features": only(True, "rows have the lengths of task_feature_lengths"),
    "runtime_preprocessors": only(None, "preprocessors are the task's"),
    "num_prefetch_threads": field("data.threads"),
    "num_workers": nothing("batches are made by threads, of --data.threads", 0),
}
_DATA_NAMES = ("t5x.utils.DatasetConfig",)
_TRAINING = Configurable(_DATA_NAMES, _TRAINING_DATA)
_EVALUATION = Configurable(
    _DATA_NAMES,
    {
        **_TRAINING_DATA,
        "mixture_or_task_name": _same("task", "task"),
        "task_feature_lengths": _same("lengths", "lengths"),
        "split": only("validation", "evaluation reads the split validation"),
        "batch_size": field("evaluation.batch_size"),
        "shuffle": only(False, "the evaluation's rows are in order"),
        "seed": nothing("validation rows have the same noise always, of the run's seed", 42),
        "use_cached": _same("use_cached", "use_cached"),
        "pack": nothing("validation rows are made as training rows", True),
        "module": _remember("evaluation_module"),
        "num_prefetch_threads": nothing("one thread makes them", None),
    },
)

_SAVE = Configurable(
    ("t5x.utils.SaveCheckpointConfig",),
    {
        "period": field("checkpoint.every_steps", 0, _or(0)),
        "keep": field("checkpoint.keep", None),
        "dtype": nothing(_AS_TRAINED, "float32"),
        "save_dataset": nothing(_STEP_IS_STATE, False),
        "keep_dataset_checkpoints": nothing(_STEP_IS_STATE, None),
        "checkpoint_steps": only(None, "set --checkpoint.keep_every_steps"),
        "checkpointer_cls": nothing(_ORBAX),
        "checkpoint_manager_cls": nothing(_ORBAX),
        "state_transformation_fns": only([], "the state is saved as it is"),
    },
)
_RESTORE = Configurable(
    ("t5x.utils.RestoreCheckpointConfig",),
    {
        "path": take(_restore_path, MUST),
        "mode": take(_restore_mode),
        "dtype": nothing("parameters are float32", "float32"),
        "strict": only(True, _WHOLE),
        "fallback_to_scratch": only(False, _WHOLE),
        "assignment_map": only(None, _WHOLE),
        "restore_dataset": nothing(_STEP_IS_STATE, False),
        "checkpointer_cls": nothing(_ORBAX),
        "checkpoint_manager_cls": nothing(_ORBAX),
        "state_transformation_fns": only([], _WHOLE),
    },
)
_CHECKPOINTS = Configurable(
    ("t5x.utils.CheckpointConfig",),
    {
        "save": take(_save, None),
        "restore": refers(_RESTORE, optional=True, default=None),
    },
)

_TRAINER = Configurable(
    ("t5x.trainer.Trainer",),
    {
        "num_microbatches": take(_microbatches),
        "learning_rate_fn": refers(_SCHEDULE),
        "weight_metrics_computer": nothing("--metrics has what is written", None),
    },
)

_SUMMARY = Configurable(("t5x.gin_utils.summarize_gin_config",), {})

# The schedule before the model: an optimizer with a rate of its own replaces it.
TRAIN = Configurable(
    ("t5x.train.train",),
    {
        "trainer_cls": refers(_TRAINER),
        "model": refers(_ENCODER_DECODER, _DECODER_ONLY, optional=True),
        "train_dataset_cfg": refers(_TRAINING),
        "infer_eval_dataset_cfg": nothing(_NO_DECODING, None),
        "checkpoint_cfg": refers(_CHECKPOINTS),
        "partitioner": refers(_PARTITIONER),
        "model_dir": field("model_dir", MUST),
        "total_steps": field("train_steps", MUST),
        "eval_steps": field("evaluation.batches", MUST),
        "eval_period": field("evaluation.every_steps", MUST),
        "train_eval_dataset_cfg": take(_no_evaluation, MUST),
        "relative_steps": take(_relative_steps),
        "stats_period": take(_stats_period),
        "random_seed": _remember("random_seed"),
        "use_hardware_rng": nothing(_HARDWARE, False),
        "summarize_config_fn": refers(_SUMMARY, default=None),
        "inference_evaluator_cls": nothing(_NO_DECODING),
        "get_dataset_fn": nothing("data are read by trainer.data"),
        "train_eval_get_dataset_fn": nothing("data are read by trainer.data"),
        "concurrent_metrics": nothing(_OWN_METRICS, True),
        "actions": nothing("a run stops at a loss that is no number: --on_nan", None),
        "run_eval_before_training": nothing("the first evaluation is at eval_period", False),
        "train_state_initializer_cls": nothing("the state is made by trainer.step"),
        "use_orbax": nothing(_ORBAX, True),
        "verify_matching_vocabs_fn": nothing("vocabularies are compared always"),
        "gc_period": nothing("memory is freed as Python does", 0),
    },
)

# Of these nothing has a counterpart; they may be bound where something refers to them.
_IDLE = (
    Configurable(
        ("seqio.Evaluator",),
        {
            name: nothing(_NO_DECODING)
            for name in ("logger_cls", "num_examples", "use_memory_cache")
        },
    ),
    Configurable(("seqio.PyLoggingLogger",), {}),
    Configurable(("seqio.TensorBoardLogger",), {}),
    Configurable(("seqio.JSONLogger",), {"write_n_results": nothing(_NO_DECODING)}),
    Configurable(
        (
            "t5x.models.EncoderDecoderModel.predict_batch_with_aux",
            "t5x.models.DecoderOnlyModel.predict_batch_with_aux",
        ),
        {"num_decodes": nothing(_NO_DECODING)},
    ),
    Configurable(
        ("t5x.decoding.temperature_sample",),
        {name: nothing(_NO_DECODING) for name in ("temperature", "topk", "topp")},
    ),
    Configurable(
        ("t5x.decoding.beam_search",),
        {name: nothing(_NO_DECODING) for name in ("alpha", "num_decodes")},
    ),
    Configurable(("t5x.trainer.TerminateOnNanAction",), {"task": nothing("see --on_nan")}),
    Configurable(("t5x.trainer.WeightMetricsComputer",), {}),
    Configurable(("t5x.utils.get_training_eval_datasets",), {}),
)

KNOWN = (
    *(TRAIN, _TRAINER, _ENCODER_DECODER, _DECODER_ONLY, _NETWORK, _DECODER_NETWORK, _T5_CONFIG),
    *(_DECODER_CONFIG, _TRAINING, _CHECKPOINTS, _SAVE, _RESTORE, _PARTITIONER, _RULES, _SCHEDULE),
    *(_ADAFACTOR, _FACTOR_RULES, _ADAMW, _LION, _SENTENCEPIECE, _BYTES, _PASS_THROUGH),
    *(_SUMMARY, *_IDLE),
)
