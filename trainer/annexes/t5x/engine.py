"""T5X as the training engine: `--engine=t5x`.

T5X makes the updates, evaluates, and writes its checkpoints and TensorBoard files into model_dir.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS
from trainer.annexes.t5x import write
from trainer.checkpoints import stored
from trainer.checkpoints.tensors import held
from trainer.config import (
    CONFIG_FILE,
    Config,
    config_changes,
    field_paths,
    load_config,
    load_record,
    save_config,
)
from trainer.data import task_record
from trainer.data.features import Batch
from trainer.data.run import EvaluationSet, Run
from trainer.engine.program import Program
from trainer.model.paths import named
from trainer.model.registry import PER_LAYER
from trainer.model.spec import ModelSpec, model_spec

TESTED_COMMIT = "cc342d419ec3"
_MISSING = (
    "--engine=t5x cannot import T5X ({error}); T5X is not on a package registry. Put github.com/"
    f"google-research/t5x (tested at commit {TESTED_COMMIT}) and github.com/google/airio on "
    "PYTHONPATH, and install their requirements: cached_property clu fiddle jaxtyping jestimator "
    "seqio tensorboard (docs/t5x_checkpoints.md)"
)

# Fields, or groups of fields with a dot at the end, that are passed on to T5X or concern only the
# data, which this project reads. All other fields must have their defaults.
_SUPPORTED = (
    *("preset", "task", "objective", "cache_dir", "model_dir", "lengths.", "mixing.", "data."),
    *("train_steps", "batch_size", "microbatches", "seed", "engine", "init_from", "deterministic"),
    *("optimizer.name", "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps"),
    *("optimizer.decay_factor", "optimizer.steps_per_decay", "optimizer.steps_per_cycle"),
    *("optimizer.minimum_learning_rate", "optimizer.clip_norm", "optimizer.weight_decay"),
    *("optimizer.multiply_by_parameter_scale", "optimizer.minimum_parameter_scale"),
    *("optimizer.maximum_parameter_scale", "optimizer.beta1", "optimizer.epsilon"),
    *("optimizer.decay_rate", "optimizer.step_offset", "optimizer.clipping_threshold"),
    *("optimizer.min_dim_size_to_factor", "loss.", "checkpoint.every_steps", "checkpoint.keep"),
    *("evaluation.every_steps", "evaluation.batch_size", "evaluation.batches", "task_module"),
    *("metrics.every_steps", "mesh.data", "mesh.tensor", "init_from_state"),
    *("init_from_vocabulary.", "optimizer.weight_decay_rate_exponent", "vocabulary."),
)
_GROUPS = tuple(name for name in _SUPPORTED if name.endswith("."))
_REASONS = {
    "on_nan": "T5X makes every update",
    "spike_factor": "T5X makes every update",
    "checkpoint.keep_every_steps": "T5X reads this setting from gin files only",
    "metrics.tensorboard": "T5X writes no other files",
    "processes.coordinator": "this engine has only been tested in one process",
}
# Fields with the same names in T5X's networks.
_SIZES = ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "dropout_rate", "dtype")
_FACTORS = (
    *("constant", "linear_warmup", "linear_decay", "rsqrt_decay", "rsqrt_normalized_decay"),
    *("decay_every", "cosine_decay"),
)


def train(run: Run, origins: dict[str, str], start: Callable[[Run], Any]) -> int:
    """Trains to `config.train_steps` with T5X and returns the exit code, 0.

    Resumes from T5X's newest checkpoint in model_dir, or starts from the initial state that the
    default engine makes. `start` is `beginning.start`. A UserError names all unsupported settings.
    """
    config = run.config
    if problems := unsupported(config):
        raise UserError("--engine=t5x: " + "; ".join(problems))
    if run.converter.special != T5_IDS:
        raise UserError(
            f"--engine=t5x: T5X uses id 0 for padding and the first input, but {config.task} has "
            "a vocabulary with other special ids; use --engine=palimpsest"
        )
    extras.prepare_tensorflow()
    try:
        from t5x import train as t5x
    except ImportError as error:
        raise UserError(_MISSING.format(error=error)) from error
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    data = _Datasets(run, first=_begin(run, origins, start))
    evaluates = bool(config.evaluation.every_steps)
    t5x.train(
        model=_model(config, run.data.vocab_size, data.have_prefixes()),
        train_dataset_cfg=data.described("train"),
        train_eval_dataset_cfg=data.described("validation") if evaluates else None,
        infer_eval_dataset_cfg=None,
        get_dataset_fn=data.training,
        train_eval_get_dataset_fn=data.evaluation,
        verify_matching_vocabs_fn=None,
        model_dir=_folder(config),
        total_steps=config.train_steps,
        eval_steps=0,
        eval_period=config.evaluation.every_steps,
        stats_period=config.metrics.every_steps,
        random_seed=config.seed,
        summarize_config_fn=lambda *_: None,
        **_machinery(config),
    )
    return 0


def _machinery(config: Config) -> dict[str, Any]:
    from t5x import partitioning, trainer, utils

    period, keep = _checkpoint_period(config), config.checkpoint.keep
    return {
        "checkpoint_cfg": utils.CheckpointConfig(
            save=utils.SaveCheckpointConfig(period=period, keep=keep)
        ),
        "partitioner": partitioning.PjitPartitioner(num_partitions=config.mesh.planned()["tensor"]),
        "trainer_cls": functools.partial(
            trainer.Trainer,
            learning_rate_fn=utils.create_learning_rate_scheduler(**_schedule(config)),
            num_microbatches=config.microbatches if config.microbatches > 1 else None,
        ),
    }


class _Datasets:
    """The dataset functions that T5X calls, for a run's batches after `first` updates."""

    def __init__(self, run: Run, first: int):
        self._run, self._first = run, first

    def described(self, split: str) -> Any:
        """Returns a split's `DatasetConfig`."""
        from t5x import utils

        lengths = dataclasses.asdict(self._run.lengths)
        return utils.DatasetConfig(
            mixture_or_task_name=self._run.config.task,
            task_feature_lengths={side: length for side, length in lengths.items() if length},
            split=split,
            batch_size=self._run.config.batch_size,
            shuffle=False,
            seed=None,
        )

    def have_prefixes(self) -> bool:
        """Returns whether batches mark prefixes to be attended to in both directions."""
        return "decoder_causal_attention" in next(self._run.data.training(self._first))

    def training(self, _: Any, shard: int, shards: int, *__: Any) -> Any:
        """Returns the training batches of one process; T5X's `get_dataset_fn`."""
        return _iterator(lambda: self._run.data.training(self._first, shard, shards))

    def evaluation(self, *_: Any) -> dict[str, Any]:
        """Returns validation batches by task; T5X's `train_eval_get_dataset_fn`."""
        config = self._run.config
        size = config.evaluation.batch_size or config.batch_size

        def batches(rows: EvaluationSet) -> Iterator[Batch]:
            return itertools.islice(rows.iterate(), config.evaluation.batches)

        sets = self._run.data.evaluation("validation", size)
        return {each.name: _iterator(functools.partial(batches, each)) for each in sets}


def unsupported(config: Config) -> list[str]:
    """Returns one message per setting that T5X does not support."""
    model, optimizer = config.model, config.optimizer
    defaults = dict(field_paths.leaves(Config(config.preset, model)))
    # Implied by the rows; T5X decodes nothing here.
    implied = ("evaluation.decoding.max_new_tokens", config.lengths.targets)
    problems = [
        f"--{path}={value}: {_REASONS.get(path, 'T5X has no such setting')}"
        for path, value in field_paths.leaves(config)
        if (path, value) != implied
        if path not in _SUPPORTED and not path.startswith(_GROUPS) and value != defaults.get(path)
    ]
    problems += write.unsupported(model)
    if model.position == PER_LAYER and not model.scan_layers:
        problems.append(f"--model.position={PER_LAYER}: T5X needs --model.scan_layers with it")
    if model.position != PER_LAYER:
        problems += [
            f"--model.{name}={value}: T5X supports this only with a table of relative positions "
            f"in every layer, --model.position={PER_LAYER}"
            for name, without in (("scan_layers", False), ("remat", "none"))
            if (value := getattr(model, name)) != without
        ]
    other_network = not model.has_encoder or model.scan_layers
    if (model.softmax_dtype, model.dtype) == ("bfloat16", "float32") or (
        other_network and (model.softmax_dtype, model.dtype) == ("float32", "bfloat16")
    ):
        problems.append(
            f"--model.softmax_dtype={model.softmax_dtype}: with {model.dtype}, this network of T5X "
            f"has a softmax in {model.dtype}"
        )
    loss = config.loss
    if config.microbatches > 1 and loss.normalizer != "sum" and loss.normalize_over == "batch":
        problems.append(
            f"--microbatches={config.microbatches}, --loss.normalizer={loss.normalizer}: T5X "
            "normalizes each microbatch separately; set --loss.normalize_over=microbatch"
        )
    if model.attention not in ("auto", "einsum"):
        problems.append(f"--model.attention={model.attention}: T5X has its own attention")
    if optimizer.name != "adafactor":
        problems.append(f"--optimizer.name={optimizer.name}: this engine supports adafactor only")
    problems += [
        f"--optimizer.schedule: T5X has no factor {name}"
        for name in optimizer.factors
        if name not in _FACTORS
    ]
    if files.is_remote(config.model_dir):
        problems.append(f"--model_dir={config.model_dir}: this engine supports local folders only")
    periods = [_checkpoint_period(config), config.evaluation.every_steps]
    if all(periods) and max(periods) % min(periods):
        problems.append(
            f"--checkpoint.every_steps={periods[0]}, --evaluation.every_steps={periods[1]}: T5X "
            "needs one to be a multiple of the other"
        )
    return problems


def _checkpoint_period(config: Config) -> int:
    return config.checkpoint.every_steps or config.train_steps


def _folder(config: Config) -> str:
    return os.path.abspath(files.local_path(config.model_dir))


def _begin(run: Run, origins: dict[str, str], start: Callable[[Run], Any]) -> int:
    """Returns the step of T5X's newest checkpoint in model_dir; writes an initial one if needed."""
    config = run.config
    folder = _folder(config)
    if files.exists(files.join(folder, CONFIG_FILE)):
        before, _ = load_config(folder)
        steps = stored.steps(folder)
        step = steps[-1] if steps else 0
        differences = config_changes(before, config, step)
        passed = before.data.skips.batch(step)
        differences += task_record.changes(load_record(folder), run.data.record, passed)
        if differences:
            raise UserError(
                f"{config.model_dir} holds a run with other settings ({'; '.join(differences)}): "
                "use the same settings, or another --model_dir"
            )
        if steps:
            return steps[-1]
    beginning = start(run)
    state = beginning.state(Program(run))
    files.make_folder(folder)
    save_config(config, origins, run.data.record)

    def tensors(tree: Any) -> dict[str, Any]:
        return {path: held(np.asarray(leaf)) for path, leaf in named(tree).items()}

    checkpoint = stored.Checkpoint(
        "", int(state.step), tensors(state.params), state=tensors(state.opt_state), run={}
    )
    write.write(checkpoint, config, folder, config.model.scan_layers)
    print(beginning.describe(), flush=True)
    return checkpoint.step


def _iterator(iterate: Callable[[], Iterator[Batch]]) -> Any:
    """Wraps batches in the iterator that T5X expects; `iter` restarts it."""
    from clu.data.dataset_iterator import ArraySpec, DatasetIterator

    class Batches(DatasetIterator):
        def __init__(self) -> None:
            self._batches = iterate()

        def __iter__(self) -> DatasetIterator:
            return Batches()

        def __next__(self) -> Batch:
            return next(self._batches)

        @property
        def element_spec(self) -> dict[str, Any]:
            first = next(iterate())
            return {name: ArraySpec(array.dtype, array.shape) for name, array in first.items()}

    return Batches()


def _model(config: Config, ids: int, prefix: bool) -> Any:
    import seqio
    from t5x import losses, models

    spec, model = model_spec(config.model), config.model
    assert isinstance(spec, ModelSpec)
    sizes = {name: getattr(model, name) for name in _SIZES}
    sizes["mlp_activations"] = spec.decoder.layers[0].feed_forward.activations
    sizes["logits_via_embedding"] = spec.output.tied
    normalizer: Any = config.loss.normalizing_constant
    if config.loss.normalizer != "sum":
        normalizer = losses.SpecialLossNormalizingFactor[config.loss.normalizer.upper()]
    common = {
        "optimizer_def": _adafactor(config),
        "z_loss": config.loss.z_loss,
        "label_smoothing": config.loss.label_smoothing,
        "loss_normalizing_factor": normalizer,
    }
    # Decoding alone would need more than the vocabulary's size.
    vocabulary = seqio.PassThroughVocabulary(ids, eos_id=1)
    if not model.has_encoder:
        from t5x.examples.decoder_only import network as decoder_only

        layers = decoder_only.TransformerConfig(num_layers=model.num_decoder_layers, **sizes)
        return models.DecoderOnlyModel(
            module=decoder_only.DecoderWrapper(layers),
            vocabulary=vocabulary,
            inputs_bidirectional_attention=prefix,
            **common,
        )
    if model.scan_layers:
        from t5x.examples.scalable_t5 import network

        sizes["remat_policy"] = {"dots": "minimal"}.get(model.remat, model.remat)
    else:
        from t5x.examples.t5 import network

        sizes["float32_attention_logits"] = model.softmax_dtype == "float32"

    stacks = ("num_encoder_layers", "num_decoder_layers")
    layers = network.T5Config(**{name: getattr(model, name) for name in stacks}, **sizes)
    return models.EncoderDecoderModel(
        module=network.Transformer(layers),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        **common,
    )


def _adafactor(config: Config) -> Any:
    from t5x import adafactor

    value = config.optimizer.value

    def finite(name: str) -> float | None:
        return None if math.isinf(value(name)) else value(name)

    same = ("multiply_by_parameter_scale", "decay_rate", "step_offset", "min_dim_size_to_factor")
    decays = value("weight_decay") or None
    return adafactor.Adafactor(
        **{name: value(name) for name in same},
        beta1=value("beta1") or None,
        clipping_threshold=finite("clipping_threshold"),
        weight_decay_rate=decays,
        weight_decay_rate_lr_exponent=decays and (value("weight_decay_rate_exponent") or None),
        epsilon1=value("epsilon"),
        epsilon2=value("minimum_parameter_scale"),
        max_parameter_scale=finite("maximum_parameter_scale"),
        global_norm_clip_threshold=config.optimizer.clip_norm,
        logical_factor_rules=adafactor.standard_logical_factor_rules(),
    )


def _schedule(config: Config) -> dict[str, Any]:
    optimizer = config.optimizer
    of_some_factors = ("decay_factor", "steps_per_decay", "steps_per_cycle")
    return {
        "factors": " * ".join(optimizer.factors),
        "base_learning_rate": optimizer.value("learning_rate"),
        "warmup_steps": optimizer.warmup_steps,
        "min_learning_rate": optimizer.minimum_learning_rate,
        **{name: optimizer.value(name) for name in of_some_factors if optimizer.value(name)},
    }
