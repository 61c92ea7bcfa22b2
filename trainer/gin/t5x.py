"""What the arguments of T5X's runs, data, checkpoints and partitions mean for us.

Source: google-research/t5x: signatures and defaults of `train.train`, `utils`, `partitioning` and
`trainer`. Models and optimizers are in `trainer.gin.t5x_model`.
"""

from __future__ import annotations

import math

from tasks.terminal.command_line import UserError
from trainer.gin import t5x_model
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
from trainer.gin.reader import Value
from trainer.gin.t5x_model import DECODER_ONLY, ENCODER_DECODER, NO_DECODING, SCHEDULE, none_is


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
_WHOLE = "the checkpoint's parameters are taken whole"
_ORBAX = "checkpoints are Orbax's, asynchronous, whole or absent"
_MESH = "set --mesh.data, --mesh.fsdp and --mesh.tensor"
_OWN_METRICS = "config.json, metrics.jsonl and TensorBoard are written always"

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
        "num_partitions": field("mesh.num_partitions", convert=none_is(1)),
        "model_parallel_submesh": take(_submesh),
        "logical_axis_rules": refers(_RULES, default=None),
        "params_on_devices": only(True, "parameters are on the devices"),
        "backend": only(None, "choose by the environment variable JAX_PLATFORMS"),
        "ici_mesh_shape": only(None, _MESH),
        "dcn_mesh_shape": only(None, _MESH),
    },
)

_TRAINING_DATA = {
    "mixture_or_task_name": keep("task", str, MUST),
    "task_feature_lengths": take(_lengths, MUST),
    "split": only("train", "training reads the split train"),
    "batch_size": field("batch_size", MUST),
    "shuffle": keep("shuffle", bool),
    "seed": keep("data_seed", int | None),
    "use_cached": keep("use_cached", bool, False),
    "pack": keep("pack", bool, False),
    "module": take(_module),
    "use_custom_packing_ops": nothing("rows are the same", False),
    "use_memory_cache": nothing("batches of the evaluation are made anew", True),
    "trim_output_features": only(True, "rows have the lengths of task_feature_lengths"),
    "runtime_preprocessors": only(None, "preprocessors are the task's"),
    "num_prefetch_threads": nothing("threads are --data.threads", None),
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
        "module": keep("evaluation_module", str | None),
        "num_prefetch_threads": nothing("one thread makes them", None),
    },
)

_SAVE = Configurable(
    ("t5x.utils.SaveCheckpointConfig",),
    {
        "period": field("checkpoint.every_steps", 0, none_is(0)),
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
        "learning_rate_fn": refers(SCHEDULE),
        "weight_metrics_computer": nothing("--metrics has what is written", None),
    },
)

_SUMMARY = Configurable(("t5x.gin_utils.summarize_gin_config",), {})

# The schedule before the model: an optimizer with a rate of its own replaces it.
TRAIN = Configurable(
    ("t5x.train.train",),
    {
        "trainer_cls": refers(_TRAINER),
        "model": refers(ENCODER_DECODER, DECODER_ONLY, optional=True),
        "train_dataset_cfg": refers(_TRAINING),
        "infer_eval_dataset_cfg": nothing(NO_DECODING, None),
        "checkpoint_cfg": refers(_CHECKPOINTS),
        "partitioner": refers(_PARTITIONER),
        "model_dir": field("model_dir", MUST),
        "total_steps": field("train_steps", MUST),
        "eval_steps": field("evaluation.batches", MUST),
        "eval_period": field("evaluation.every_steps", MUST),
        "train_eval_dataset_cfg": take(_no_evaluation, MUST),
        "relative_steps": take(_relative_steps),
        "stats_period": take(_stats_period),
        "random_seed": keep("random_seed", int | None),
        "use_hardware_rng": nothing(_HARDWARE, False),
        "summarize_config_fn": refers(_SUMMARY, default=None),
        "inference_evaluator_cls": nothing(NO_DECODING),
        "get_dataset_fn": nothing("data are read by trainer.data.cached"),
        "train_eval_get_dataset_fn": nothing("data are read by trainer.data.cached"),
        "concurrent_metrics": nothing(_OWN_METRICS, True),
        "actions": nothing("a run stops at a loss that is no number: --on_nan", None),
        "run_eval_before_training": nothing("the first evaluation is at eval_period", False),
        "train_state_initializer_cls": nothing("the state is made by trainer.engine.step"),
        "use_orbax": nothing(_ORBAX, True),
        "verify_matching_vocabs_fn": nothing("vocabularies are compared always"),
        "gc_period": nothing("memory is freed as Python does", 0),
    },
)

# Of these nothing has a counterpart; they may be bound where something refers to them.
_IDLE = (
    Configurable(
        ("seqio.Evaluator",),
        {name: nothing(NO_DECODING) for name in ("logger_cls", "num_examples", "use_memory_cache")},
    ),
    Configurable(("seqio.PyLoggingLogger",), {}),
    Configurable(("seqio.TensorBoardLogger",), {}),
    Configurable(("seqio.JSONLogger",), {"write_n_results": nothing(NO_DECODING)}),
    Configurable(
        (
            "t5x.models.EncoderDecoderModel.predict_batch_with_aux",
            "t5x.models.DecoderOnlyModel.predict_batch_with_aux",
        ),
        {"num_decodes": nothing(NO_DECODING)},
    ),
    Configurable(
        ("t5x.decoding.temperature_sample",),
        {name: nothing(NO_DECODING) for name in ("temperature", "topk", "topp")},
    ),
    Configurable(
        ("t5x.decoding.beam_search",),
        {name: nothing(NO_DECODING) for name in ("alpha", "num_decodes")},
    ),
    Configurable(("t5x.trainer.TerminateOnNanAction",), {"task": nothing("see --on_nan")}),
    Configurable(("t5x.trainer.WeightMetricsComputer",), {}),
    Configurable(("t5x.utils.get_training_eval_datasets",), {}),
)

KNOWN = (
    *(TRAIN, _TRAINER, _TRAINING, _CHECKPOINTS, _SAVE, _RESTORE, _PARTITIONER, _RULES, _SUMMARY),
    *(*t5x_model.KNOWN, *_IDLE),
)
