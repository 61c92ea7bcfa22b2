"""The configuration of a run: frozen typed dataclasses, and where each value came from.

A preset < gin files < what the task and the cache imply < `--field.path=value`. Every field keeps
its origin.
No heavy import: `python -m trainer.pretrain --help` needs none.
"""

import dataclasses
import re
from typing import Any

from tasks import mixture
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import fields
from trainer.config.mesh import MeshConfig
from trainer.config.optimizer import OptimizerConfig
from trainer.config.processes import ProcessesConfig
from trainer.model.config import ModelConfig

CONFIG_FILE = "config.json"

SHUFFLES = ("global", "block", "none")
ENGINES = ("palimpsest", "t5x")
ON_NAN = ("stop", "skip")
# Of `Evaluator`'s metrics those that can say which checkpoint is best; accuracy is best high.
BEST_METRICS = ("loss", "perplexity", "accuracy", "bits_per_byte")

NORMALIZERS = (
    "sum",
    "num_real_target_tokens",
    "num_total_target_tokens",
    "average_per_sequence",
)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The loss in T5X's words.

    `z_loss` is the weight of log(Z)^2, which keeps the normalisers of the softmax near 1.
    `label_smoothing` is the probability spread over the wrong tokens.

    `normalizer` says what the sum over tokens is divided by: "sum" nothing (T5X's
    `loss_normalizing_factor = None`), "num_real_target_tokens" the sum of weights,
    "num_total_target_tokens" batch times length, "average_per_sequence" the number of sequences,
    each one's tokens weighing 1 together. `normalizing_constant` is a divisor of one's own, with
    "sum". Adafactor divides by the size of the gradient, so for it the choice among the first
    three changes nothing but the loss that is printed; "average_per_sequence" weighs tokens anew.

    Raises:
        ValueError: at construction, naming the field, if a value makes no sense.
    """

    z_loss: float = 1e-4
    label_smoothing: float = 0.0
    normalizer: str = "sum"
    normalizing_constant: float | None = None

    def __post_init__(self) -> None:
        if self.normalizer not in NORMALIZERS:
            known = ", ".join(repr(name) for name in NORMALIZERS)
            raise ValueError(
                f"LossConfig.normalizer is {self.normalizer!r}; it must be one of {known}"
            )
        if self.z_loss < 0:
            raise ValueError(f"LossConfig.z_loss is {self.z_loss}; it must be 0 or more")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"LossConfig.label_smoothing is {self.label_smoothing}; it must be in [0, 1)"
            )
        if self.normalizing_constant is not None:
            if self.normalizer != "sum":
                raise ValueError(
                    "LossConfig.normalizing_constant goes with normalizer 'sum', "
                    f"not with {self.normalizer!r}"
                )
            if self.normalizing_constant <= 0:
                raise ValueError(
                    f"LossConfig.normalizing_constant is {self.normalizing_constant}; "
                    "it must be above 0"
                )


@dataclasses.dataclass(frozen=True)
class LengthsConfig:
    """Positions of an example's features, EOS included. None: the task's own."""

    inputs: int | None = None
    targets: int | None = None


@dataclasses.dataclass(frozen=True)
class MixingConfig:
    """How a run mixes tasks; see tasks.mixture for what rates are.

    `maximum` and `temperature` replace the mixture's own. `schedule`, "20000: a=0.5,b=0.5; …", has
    other rates, or further tasks, from a number of updates on; on resume, only what lies ahead may
    differ. No task repeats a window because rates change.
    """

    maximum: int | None = None
    temperature: float | None = None
    schedule: str = ""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """How the cache is read.

    `shuffle` "global" permutes all windows of an epoch; "block", for a remote cache larger than the
    disk, permutes blocks of whole shards of at most `block_bytes` and the windows inside each;
    "none" reads windows in the cache's order. Shards of a remote cache are copied to `local_dir`,
    where they stay for the next start (None: to a temporary folder), at most `local_bytes` of them
    at a time. `threads` make up to `prefetch` batches ahead; one is fastest where batches are
    small, by benchmarks/input_pipeline.py.

    A task of seqio's is read from a cache if it has one; `use_cached` False: never; True says so
    where it has none. `pack` False leaves its examples one a row.
    """

    shuffle: str = "global"
    block_bytes: int = 16 << 30
    local_bytes: int = 50 << 30
    local_dir: str | None = None
    threads: int = 1
    prefetch: int = 4
    use_cached: bool | None = None
    pack: bool = True

    def __post_init__(self) -> None:
        if self.shuffle not in SHUFFLES:
            raise ValueError(
                f"DataConfig.shuffle is {self.shuffle!r}; it must be one of {', '.join(SHUFFLES)}"
            )
        for name in ("block_bytes", "local_bytes", "threads", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"DataConfig.{name} is {getattr(self, name)}; it must be 1 or more"
                )


def _at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(
                f"{type(config).__name__}.{name} is {value}; it must be {least} or more"
            )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every so many steps (0: only where the run ends), and at the last.

    The newest `keep` stay (None: all), those of multiples of `keep_every_steps` for ever, and, with
    `best_metric`, one of BEST_METRICS, the one that was best on the validation split: every
    evaluation better than all before it is followed by a checkpoint.

    Raises:
        ValueError: at construction, naming the field, if a value makes no sense.
    """

    every_steps: int = 1000
    keep: int | None = 3
    keep_every_steps: int | None = None
    best_metric: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, 0, "every_steps")
        _at_least(self, 1, "keep", "keep_every_steps")
        if self.best_metric is not None and self.best_metric not in BEST_METRICS:
            raise ValueError(
                f"CheckpointConfig.best_metric is {self.best_metric!r}; it must be one of "
                f"{', '.join(BEST_METRICS)}"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the whole validation split every so many steps, and at the last; 0: never.

    `batch_size` None is the training batch's; the result does not depend on it, save of Switch
    layers, where rows of up to 1,024 tokens together share the room at each expert. `batches` of a
    task are evaluated on, from its first, in place of all: T5X's `eval_steps`.
    """

    every_steps: int = 1000
    batch_size: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 0, "every_steps")
        _at_least(self, 1, "batch_size", "batches")


@dataclasses.dataclass(frozen=True)
class VocabularyConfig:
    """The vocabulary that tasks and caches must have; None: whichever they have.

    `model_file` is a SentencePiece model, `extra_ids` the sentinels that come on top of its pieces.
    """

    model_file: str | None = None
    extra_ids: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 0, "extra_ids")


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Training metrics, summed over so many steps, go to JSON lines and TensorBoard.

    `wandb` is a project of Weights & Biases that they go to besides.
    """

    every_steps: int = 100
    tensorboard: bool = True
    wandb: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "every_steps")


@dataclasses.dataclass(frozen=True)
class Config:
    """A run. `model_dir` is where it writes; `cache_dir` what pipeline.build wrote.

    `task` is a task, a mixture, tasks with rates as "a=0.7,b=0.3", or "seqio:NAME" for any task or
    mixture registered with seqio. `objective` sets fields of the task's objective, as
    "mask.noise_density=0.5,mask.mean_noise_span_length=8". `batch_size` counts rows of the global
    batch; gradients are summed over `microbatches` equal parts of it, one after the other, which
    takes less memory. Both may be given in positions of the longer feature, as in Mesh TensorFlow:
    `tokens_per_batch` / length are the rows, and a microbatch has on each device of the rows at
    most `tokens_per_microbatch_per_replica`, or one row. `seed` determines initial parameters,
    dropout, the order of windows and their
    noise.

    `on_nan` says what becomes of an update whose loss or gradients are no finite numbers, or whose
    loss is above `spike_factor` times the mean loss of about the last hundred steps: "stop" saves
    the state before it and ends the run, "skip" leaves the update out and counts it.
    `engine` makes the updates: this trainer, or an installed T5X (docs/t5x_checkpoints.md).
    `init_from` is a checkpoint, or a folder with several, with which a run begins that has none of
    its own: ours, T5X's, or "hf:DIR" of Hugging Face transformers (docs/t5x_checkpoints.md).
    `init_from_state`: its optimizer state comes along, and its step, which is the place in schedule
    and data.
    `profile_steps`, "10:20", has the updates 10 to 20 of a run traced into `model_dir/profile`.
    """

    preset: str
    model: ModelConfig
    task: str = ""
    task_module: str | None = None
    objective: tuple[str, ...] = ()
    cache_dir: str = ""
    model_dir: str = ""
    train_steps: int = 10_000
    batch_size: int = 128
    microbatches: int = 1
    tokens_per_batch: int | None = None
    tokens_per_microbatch_per_replica: int | None = None
    seed: int = 0
    engine: str = "palimpsest"
    init_from: str | None = None
    init_from_state: bool = True
    on_nan: str = "stop"
    spike_factor: float | None = None
    profile_steps: str | None = None
    lengths: LengthsConfig = LengthsConfig()
    mixing: MixingConfig = MixingConfig()
    data: DataConfig = DataConfig()
    vocabulary: VocabularyConfig = VocabularyConfig()
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    processes: ProcessesConfig = dataclasses.field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"--engine={self.engine}: it must be {' or '.join(ENGINES)}")
        if self.on_nan not in ON_NAN:
            raise ValueError(f"--on_nan={self.on_nan}: it must be {' or '.join(ON_NAN)}")
        if self.init_from is None and not self.init_from_state:
            raise ValueError("--init_from_state=false has no effect without --init_from")
        if self.spike_factor is not None and not self.spike_factor > 1:
            raise ValueError(f"--spike_factor={self.spike_factor}: it must be above 1")
        if self.profile_steps is not None and not self.profiled:
            raise ValueError(
                f"--profile_steps={self.profile_steps}: give the first and the last update to "
                "trace, as 10:20"
            )
        if self.checkpoint.best_metric and not self.evaluation.every_steps:
            raise ValueError("--checkpoint.best_metric needs evaluations: set every_steps of them")

    @property
    def profiled(self) -> range:
        """The updates to trace, counted from 1; empty if there are none."""
        found = re.fullmatch(r"(\d+):(\d+)", self.profile_steps or "")
        return range(max(1, int(found[1])), int(found[2]) + 1) if found else range(0)


# What may differ between a checkpoint's run and the one that resumes it: nothing that changes a
# parameter of an earlier step. The schedule of rates is compared up to the checkpoint. `on_nan` and
# `spike_factor` may, so that a run that stopped can go on: updates already skipped stay skipped.
# Another mesh, number of microbatches or attention takes the same sums in another order.
RESUMABLE_CHANGES = (
    "preset",
    "cache_dir",
    "model_dir",
    "task_module",
    "train_steps",
    "on_nan",
    "spike_factor",
    "profile_steps",
    "mixing.schedule",
    "vocabulary.",
    "data.local_",
    "data.threads",
    "data.prefetch",
    "checkpoint.",
    "evaluation.",
    "metrics.",
    "mesh.",
    "microbatches",
    "model.attention",
    "model.remat",
    "tokens_per_microbatch_per_replica",
    "processes.",
)


def save_config(config: Config, origins: dict[str, str]) -> None:
    """Writes config.json into the model directory."""
    value = {"config": dataclasses.asdict(config), "origins": origins}
    files.write_json(files.join(config.model_dir, CONFIG_FILE), value)


def load_config(model_dir: str) -> tuple[Config, dict[str, str]]:
    """Reads the configuration of the run in `model_dir`, and the origins of its fields.

    Raises:
      UserError: there is no run, or one of another version.
    """
    path = files.join(model_dir, CONFIG_FILE)
    if not files.exists(path):
        raise UserError(
            f"{model_dir} holds no run (there is no {CONFIG_FILE}): train one with trainer.pretrain"
        )
    value = files.read_json(path)
    return fields.from_dict(Config, value["config"], path), value["origins"]


def config_changes(before: Config, now: Config, step: int) -> list[str]:
    """The fields, of those that determine the parameters up to `step`, in which two configurations
    differ."""
    old = dict(fields.leaves(before))
    found = [
        f"{path} was {old.get(path)}, is {value}"
        for path, value in fields.leaves(now)
        if old.get(path) != value and not path.startswith(RESUMABLE_CHANGES)
    ]
    schedules = [
        [entry for entry in mixture.parse_schedule(config.mixing.schedule) if entry[0] < step]
        for config in (before, now)
    ]
    if schedules[0] != schedules[1]:
        found.append(
            f"mixing.schedule was {before.mixing.schedule!r}, is {now.mixing.schedule!r}, "
            f"different before update {step}"
        )
    return found
