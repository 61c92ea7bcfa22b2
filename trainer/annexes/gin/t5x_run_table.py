"""Maps arguments of T5X's runs, data, checkpoints and partitions to our configuration fields.

Source: google-research/t5x: signatures and defaults of `train.train`, `utils`, `partitioning` and
`trainer`. Models and optimizers are in `trainer.annexes.gin.t5x_model_table`.
"""

import math

from tasks.terminal.command_line import UserError
from trainer.annexes.gin import t5x_model_table
from trainer.annexes.gin import translate as m
from trainer.annexes.gin.reader import Value
from trainer.annexes.gin.t5x_model_table import (
    DECODER_ONLY,
    ENCODER_DECODER,
    NO_DECODING,
    SCHEDULE,
    none_is,
)


def _lengths(reading: m.Reading, found: Value) -> None:
    lengths = found.value if isinstance(found.value, dict) else {"": 0}
    known = set(lengths) <= {"inputs", "targets"}
    if not known or not all(map(m.is_size, lengths.values())):
        rule = "lengths of inputs and targets: {'inputs': 512, 'targets': 114}"
        raise found.must_be("task_feature_lengths", rule)
    for side, length in lengths.items():
        reading.set(f"lengths.{side}", length, found.origin)
    reading.facts["lengths"] = found


def _same(fact: str, what: str) -> m.Argument:

    def check(reading: m.Reading, found: Value) -> None:
        trained = reading.facts.get(fact)
        if trained and found.value not in (trained.value, None):
            raise UserError(
                f"{found.origin}: the evaluation's {what} {found.value!r} differs from the "
                f"training's {trained.value!r} ({trained.origin}): here, they must be the same"
            )

    return m.take(check)


def _evaluated_split(reading: m.Reading, found: Value) -> None:
    if found.value != "validation":
        reading.warn(
            f"train_eval/DatasetConfig.split = {found.value!r} ({found.origin}): here, evaluation "
            "reads the validation split; trainer.evaluate --split=train reads the training split"
        )


def _module(reading: m.Reading, found: Value) -> None:
    if found.value is not None:
        reading.warn(
            f"module = {found.value!r} ({found.origin}) is not imported: set "
            f"--task_module={found.value} to load it"
        )


def _save(reading: m.Reading, found: Value) -> None:
    if found.value is not None:
        reading.follow("CheckpointConfig.save", found, (_SAVE,))
        return
    reading.set("checkpoint.every_steps", 0, found.origin)
    reading.warn(f"save = None ({found.origin}): the last state is saved all the same")


def _relative_steps(reading: m.Reading, found: Value) -> None:
    if found.value is None:
        return
    if "init_from" in reading.fields:
        raise UserError(
            f"{found.origin}: relative_steps = {found.value!r} with a checkpoint to start "
            "from: set total_steps, including the checkpoint's steps"
        )
    reading.set("train_steps", found.value, found.origin)


def _stats_period(reading: m.Reading, found: Value) -> None:
    if found.value is not None:
        reading.set("metrics.every_steps", found.value, found.origin)


def _no_evaluation(reading: m.Reading, found: Value) -> None:
    if found.value is None:
        reading.set("evaluation.every_steps", 0, found.origin)
    else:
        reading.follow("train.train_eval_dataset_cfg", found, (_EVALUATION,))


def _restore_path(reading: m.Reading, found: Value) -> None:
    paths = [found.value] if isinstance(found.value, str) else found.value
    if not paths:
        return
    if not isinstance(paths, list | tuple) or len(paths) > 1 or not isinstance(paths[0], str):
        raise found.must_be("RestoreCheckpointConfig.path", "the path of one checkpoint, or []")
    reading.set("init_from", paths[0], found.origin)


def _restore_mode(reading: m.Reading, found: Value) -> None:
    # --init_from accepts a checkpoint or a folder; it uses a folder's newest checkpoint.
    if found.value not in ("specific", "latest"):
        advice = "to evaluate all checkpoints of a folder, use trainer.evaluate --steps=all"
        raise found.must_be("mode", f"'specific' or 'latest': {advice}")


def _submesh(reading: m.Reading, found: Value) -> None:
    if found.value is None:
        return
    sizes = found.value
    if not isinstance(sizes, list | tuple) or not all(map(m.is_size, sizes)):
        raise found.must_be("model_parallel_submesh", "four sizes above 0, or None")
    # As in T5X, the submesh overrides num_partitions with the product of its sizes.
    reading.set("mesh.tensor", math.prod(sizes), found.origin)
    reading.warn(
        f"model_parallel_submesh = {sizes!r} ({found.origin}) sets only the number of devices, "
        f"{math.prod(sizes)}; the mesh decides which ones"
    )


def _parameter_dims(reading: m.Reading, found: Value) -> None:
    if found.value not in (1, 2):
        raise found.must_be("parameter_partitioning_dims", "1 or 2")
    if found.value == 2:
        # T5X divides the embedding's axis over "data"; here "fsdp" does that.
        reading.set("mesh.data", 1, found.origin)
        reading.set("mesh.fsdp", -1, found.origin)


_HARDWARE = "random numbers come from JAX's threefry, which is the same on all hardware"
_AS_TRAINED = "checkpoints hold the training state, in float32"
_STEP_IS_STATE = "the position in the data follows from the step, which checkpoints hold"
_WHOLE = "all parameters of the checkpoint are used"
_ORBAX = "checkpoints are Orbax's, asynchronous and atomic"
_MESH = "set --mesh.data, --mesh.fsdp and --mesh.tensor"
_OWN_METRICS = "config.json, metrics.jsonl and TensorBoard files are always written"

_RULES = m.configurable(
    "t5x.partitioning.standard_logical_axis_rules",
    activation_partitioning_dims=m.nothing("the compiler divides activations", 1),
    parameter_partitioning_dims=m.take(_parameter_dims),
    additional_rules=m.only(None, "--mesh.rules names the supported tables"),
)
_PARTITIONER = m.configurable(
    "t5x.partitioning.PjitPartitioner",
    num_partitions=m.field("mesh.tensor", convert=m.partitions),
    model_parallel_submesh=m.take(_submesh),
    logical_axis_rules=m.refers(_RULES, default=None),
    params_on_devices=m.only(True, "parameters are always on the devices"),
    backend=m.only(None, "set the environment variable JAX_PLATFORMS instead"),
    ici_mesh_shape=m.only(None, _MESH),
    dcn_mesh_shape=m.only(None, _MESH),
)

_TRAINING_DATA = {
    "mixture_or_task_name": m.keep("task", str, m.MUST),
    "task_feature_lengths": m.take(_lengths, m.MUST),
    "split": m.only("train", "training reads the train split"),
    "batch_size": m.field("batch_size", m.MUST),
    "shuffle": m.keep("shuffle", bool),
    "seed": m.keep("data_seed", int | None),
    "use_cached": m.keep("use_cached", bool, False),
    "pack": m.keep("pack", bool, False),
    "module": m.take(_module),
    "use_custom_packing_ops": m.nothing("rows are the same either way", False),
    "use_memory_cache": m.nothing("evaluation batches are made again each time", True),
    "trim_output_features": m.only(True, "rows have the lengths of task_feature_lengths"),
    "runtime_preprocessors": m.only(None, "the task sets its preprocessors"),
    "num_prefetch_threads": m.nothing("set --data.threads instead", None),
    "num_workers": m.nothing("batches are made by threads; set --data.threads instead", 0),
}
_TRAINING = m.configurable("t5x.utils.DatasetConfig", **_TRAINING_DATA)
_EVALUATION = m.configurable(
    "t5x.utils.DatasetConfig",
    **_TRAINING_DATA
    | {
        "mixture_or_task_name": _same("task", "task"),
        "task_feature_lengths": _same("lengths", "lengths"),
        "split": m.take(_evaluated_split),
        "batch_size": m.field("evaluation.batch_size"),
        "shuffle": m.only(False, "evaluation reads rows in order"),
        "seed": m.nothing("validation rows always have the same noise, from the run's seed", 42),
        "use_cached": _same("use_cached", "use_cached"),
        "pack": m.nothing("validation rows are packed like training rows", True),
        "module": m.nothing("--task_module loads the module of both", None),
        "num_prefetch_threads": m.nothing("one thread makes evaluation batches", None),
    },
)

_SAVE = m.configurable(
    "t5x.utils.SaveCheckpointConfig",
    period=m.field("checkpoint.every_steps", 0, none_is(0)),
    keep=m.field("checkpoint.keep", None),
    dtype=m.nothing(_AS_TRAINED, "float32"),
    save_dataset=m.nothing(_STEP_IS_STATE, False),
    keep_dataset_checkpoints=m.nothing(_STEP_IS_STATE, None),
    checkpoint_steps=m.only(None, "set --checkpoint.keep_every_steps instead"),
    checkpointer_cls=m.nothing(_ORBAX),
    checkpoint_manager_cls=m.nothing(_ORBAX),
    state_transformation_fns=m.only([], "the state is saved unchanged"),
)
_RESTORE = m.configurable(
    "t5x.utils.RestoreCheckpointConfig",
    path=m.take(_restore_path, m.MUST),
    mode=m.take(_restore_mode),
    dtype=m.nothing("parameters are always float32", "float32"),
    strict=m.only(True, _WHOLE),
    fallback_to_scratch=m.only(False, _WHOLE),
    assignment_map=m.only(None, _WHOLE),
    restore_dataset=m.nothing(_STEP_IS_STATE, False),
    checkpointer_cls=m.nothing(_ORBAX),
    checkpoint_manager_cls=m.nothing(_ORBAX),
    state_transformation_fns=m.only([], _WHOLE),
)
_CHECKPOINTS = m.configurable(
    "t5x.utils.CheckpointConfig",
    save=m.take(_save, None),
    restore=m.refers(_RESTORE, optional=True, default=None),
)

_TRAINER = m.configurable(
    "t5x.trainer.Trainer",
    num_microbatches=m.field("microbatches", convert=lambda number: number or 1),
    learning_rate_fn=m.refers(SCHEDULE),
    weight_metrics_computer=m.nothing("the metrics are fixed", None),
)

_SUMMARY = m.configurable("t5x.gin_utils.summarize_gin_config")

# The trainer precedes the model, so that an optimizer's own rate overrides the trainer's schedule.
TRAIN = m.configurable(
    "t5x.train.train",
    trainer_cls=m.refers(_TRAINER),
    model=m.refers(ENCODER_DECODER, DECODER_ONLY, optional=True),
    train_dataset_cfg=m.refers(_TRAINING),
    infer_eval_dataset_cfg=m.nothing(NO_DECODING, None),
    checkpoint_cfg=m.refers(_CHECKPOINTS),
    partitioner=m.refers(_PARTITIONER),
    model_dir=m.field("model_dir", m.MUST),
    total_steps=m.field("train_steps", m.MUST),
    eval_steps=m.field("evaluation.batches", m.MUST),
    eval_period=m.field("evaluation.every_steps", m.MUST),
    train_eval_dataset_cfg=m.take(_no_evaluation, m.MUST),
    relative_steps=m.take(_relative_steps),
    stats_period=m.take(_stats_period),
    random_seed=m.keep("random_seed", int | None),
    use_hardware_rng=m.nothing(_HARDWARE, False),
    summarize_config_fn=m.refers(_SUMMARY, default=None),
    inference_evaluator_cls=m.nothing(NO_DECODING),
    get_dataset_fn=m.nothing("trainer.data.cached reads the data"),
    train_eval_get_dataset_fn=m.nothing("trainer.data.cached reads the data"),
    concurrent_metrics=m.nothing(_OWN_METRICS, True),
    actions=m.nothing("--on_nan decides what happens if a loss is not finite", None),
    run_eval_before_training=m.nothing("the first evaluation is at step eval_period", False),
    train_state_initializer_cls=m.nothing("trainer.engine.step makes the state"),
    use_orbax=m.nothing(_ORBAX, True),
    verify_matching_vocabs_fn=m.nothing("vocabularies are always compared"),
    gc_period=m.nothing("Python's garbage collection is unchanged", 0),
)


def _undecoded(*names: str, arguments: str) -> m.Configurable:
    return m.configurable(*names, **dict.fromkeys(arguments.split(), m.nothing(NO_DECODING)))


# Configurables without a counterpart that files may still bind and refer to.
_IDLE = (
    m.configurable(
        "seqio.Evaluator",
        logger_cls=m.nothing(NO_DECODING),
        num_examples=m.nothing("set --evaluation.examples", None),
        use_memory_cache=m.nothing(NO_DECODING),
    ),
    m.configurable("seqio.PyLoggingLogger"),
    m.configurable("seqio.TensorBoardLogger"),
    _undecoded("seqio.JSONLogger", arguments="write_n_results"),
    _undecoded(
        "t5x.models.EncoderDecoderModel.predict_batch_with_aux",
        "t5x.models.DecoderOnlyModel.predict_batch_with_aux",
        arguments="num_decodes",
    ),
    _undecoded("t5x.decoding.temperature_sample", arguments="temperature topk topp"),
    _undecoded("t5x.decoding.beam_search", arguments="alpha num_decodes"),
    m.configurable("t5x.trainer.TerminateOnNanAction", task=m.nothing("see --on_nan")),
    m.configurable("t5x.trainer.WeightMetricsComputer"),
    m.configurable("t5x.utils.get_training_eval_datasets"),
)

KNOWN = (
    *(TRAIN, _TRAINER, _TRAINING, _CHECKPOINTS, _SAVE, _RESTORE, _PARTITIONER, _RULES, _SUMMARY),
    *(*t5x_model_table.KNOWN, *_IDLE),
)
