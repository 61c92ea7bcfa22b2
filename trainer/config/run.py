"""A run's configuration. Imports nothing heavy, because --help imports this."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from tasks import annexes
from tasks.terminal.flag_fields import (
    REQUIRED,
    SEED,
    Checked,
    ReadIf,
    Rule,
    above,
    at_least,
    check,
    field,
    require,
)
from trainer.config import field_paths
from trainer.config.data import (
    ON_CACHES,
    OURS,
    DataConfig,
    LengthsConfig,
    MixingConfig,
    VocabularyConfig,
)
from trainer.config.evaluation import (
    CheckpointConfig,
    EvaluationConfig,
    PlateauConfig,
    StoppingConfig,
    check_watched,
)
from trainer.config.loss import LossConfig
from trainer.config.mesh import MeshConfig
from trainer.config.optimizer import OptimizerConfig
from trainer.config.phases import LENGTHS, ROWS, TOKENS, Phases, phases_of
from trainer.config.processes import ProcessesConfig
from trainer.model.config import ModelConfig

_ENGINES = ("palimpsest", *annexes.entries("training_engines"))
# Whose checkpoints a run can start from.
_STARTS = " or ".join(("this trainer", *annexes.entries("checkpoints")))
_ON_NAN = ("stop", "skip")


@dataclasses.dataclass(frozen=True)
class MetricsConfig(Checked):
    """Training metrics and norms, always written to metrics.jsonl in model_dir."""

    every_steps: int = field(
        100,
        "updates that each line of training metrics covers; 1 or more",
        rule=at_least(1),
        often="updates per line of metrics",
    )
    norms_every_steps: int = field(
        0,
        "updates between lines of norms: root mean squares of parameters, gradients and updates "
        "by layer, like T5X's weight_rms; a line takes as long as an update; 0: never",
        rule=at_least(0),
    )
    tensorboard: bool = field(True, "also write TensorBoard files")
    wandb: str | None = field(
        None,
        "also log to this project of Weights & Biases",
        often="project of Weights & Biases to log to",
    )


_OPTIONS = Rule(
    "options as NAME=VALUE, each name once, such as xla_tpu_scoped_vmem_limit_kib=65536",
    lambda value: (
        all(re.fullmatch(r"xla_\w+=[^\s=]+", each) for each in value)
        and len({each.partition("=")[0] for each in value}) == len(value)
    ),
)
_PROFILED = Rule(
    "the first and last update to trace, such as 10:20", lambda value: bool(_updates(value))
)
BRANCH = Rule(
    "a run's folder and a checkpoint's step, such as model@40000",
    lambda text: bool(re.fullmatch(r".+@[1-9]\d*", text)),
)


@dataclasses.dataclass(frozen=True)
class _Config:
    """A run's configuration.

    As in Mesh TensorFlow, `tokens_per_batch` and `tokens_per_microbatch_per_replica` count
    positions of the longer feature; `prepare` derives `batch_size` and `microbatches` from them.
    """

    preset: str = field(
        REQUIRED,
        "preset of the model",
        changes="nothing",
        often="model (--help=presets lists them)",
    )
    model: ModelConfig = field(REQUIRED, "The model")
    task: str = field(
        "",
        "task or mixture to train on, tasks with rates (a=0.7,b=0.3), or seqio:NAME for a task or "
        "mixture in seqio's registry",
        changes="batches",
        often="task, mixture, or rates (a=0.7,b=0.3)",
        joined=",",
    )
    task_module: str | None = field(
        None, "Python module that defines more tasks in a tuple TASKS", changes="nothing"
    )
    objective: tuple[str, ...] = field(
        (),
        "settings of the task's objective: mask.noise_density=0.5,mask.mean_noise_span_length=8",
        changes="batches",
        read_if=ON_CACHES,
    )
    cache_dir: str = field(
        "",
        "folder or URL of the caches written by pipeline.build",
        changes="nothing",
        often="caches that pipeline.build wrote",
    )
    model_dir: str = field(
        "",
        "folder or URL that the run writes to and resumes from",
        changes="nothing",
        often="folder to write to and resume from",
    )
    train_steps: int = field(
        10_000,
        "total number of updates; 1 or more",
        rule=Rule("1 to 2**31 - 1", lambda steps: 1 <= steps < 2**31),  # JAX counts in int32
        changes="nothing",
        often="updates to train for",
    )
    rate_may_rise: bool = field(
        False,
        "let a finished run that is continued raise its learning rate again, as a cosine's next "
        "cycle does",
        changes="nothing",
    )
    train_tokens: str | None = field(
        None,
        "total number of tokens, such as 300B, instead of train_steps; a row has as many as its "
        "longer feature",
        rule=TOKENS,
        changes="nothing",
    )
    batch_size: int = field(
        128,
        "number of rows in the global batch; 1 or more",
        rule=at_least(1),
        changes="batches",
        often="rows in the global batch",
    )
    batch_schedule: str = field(
        "",
        "numbers of rows that take effect after given updates or tokens, such as '2000: 64; "
        "2B: 128'; on resume, only future entries may change (docs/training.md)",
        rule=ROWS,
        changes="later_batches",
        joined=";",
        read_if=ON_CACHES,
    )
    length_schedule: str = field(
        "",
        "lengths of features that take effect after given updates or tokens, such as '8000: "
        "inputs=4096,targets=910'; on resume, only future entries may change (docs/training.md)",
        rule=LENGTHS,
        changes="later_batches",
        joined=";",
        read_if=ON_CACHES,
    )
    microbatches: int = field(
        1,
        "number of equal parts of the batch, computed in turn to save memory, with summed "
        "gradients; 1 or more",
        rule=at_least(1),
        changes="rounding",
        often="parts of a batch, computed in turn",
    )
    tokens_per_batch: int | None = field(
        None,
        "tokens per global batch, a multiple of the longer feature's length, instead of batch_size",
        rule=at_least(1),
    )
    tokens_per_microbatch_per_replica: int | None = field(
        None,
        "maximum number of tokens per microbatch on each data-parallel replica, but at least one "
        "row, instead of microbatches",
        rule=at_least(1),
        changes="rounding",
    )
    seed: int = field(
        0,
        "seed of initial parameters, dropout, and the order and noise of windows",
        rule=SEED,
        changes="batches",
        often="seed of parameters, dropout, order and noise",
    )
    engine: str = field(
        "palimpsest",
        "code that makes the updates; palimpsest: this trainer (docs/t5x_checkpoints.md)",
        choices=_ENGINES,
    )
    init_from: str | None = field(
        None,
        f"checkpoint (or folder of checkpoints) of {_STARTS} to start from if model_dir "
        "has none; or hf:DIR, a Hugging Face transformers folder (docs/t5x_checkpoints.md)",
        often="checkpoint, run or hf:FOLDER to start from",
    )
    init_from_state: bool = field(
        True,
        "also take the optimizer state and step of init_from, which determine the position in the "
        "schedule and in the data; false: parameters only",
        read_if=ReadIf(lambda config: config.init_from is not None, "without --init_from"),
    )
    branch_from: str | None = field(
        None,
        "start a new run from the whole state of another run's checkpoint, RUN@STEP, with its "
        "settings unless flags change them (docs/training.md)",
        rule=BRANCH,
    )
    rewind_to: int | None = field(
        None,
        "go back to the checkpoint of this update in model_dir and set later ones aside, once: "
        "the same command then resumes (docs/training.md)",
        rule=at_least(1),
        changes="nothing",
    )
    trainable: str | None = field(
        None,
        "train only parameters whose path (decoder/layers_0/mlp/wo/kernel) contains a match of "
        "this regular expression; None: all",
    )
    on_nan: str = field(
        "stop",
        "what to do about an update whose loss or gradients are not finite, or whose loss exceeds "
        "spike_factor: stop saves the state before it and ends the run; skip skips and counts it",
        choices=_ON_NAN,
        changes="later",
    )
    compiler_options: tuple[str, ...] = field(
        (),
        "options of XLA's compiler for the run's programs, NAME=VALUE, such as "
        "xla_tpu_scoped_vmem_limit_kib=65536 (docs/tpu.md)",
        rule=_OPTIONS,
        changes="rounding",
    )
    deterministic: bool = field(
        True,
        "on GPUs, use only kernels that compute the same bits in every run, which are slower; CPUs "
        "and TPUs always do",
        changes="rounding",
    )
    spike_factor: float | None = field(
        None,
        "treat a loss as not finite if it exceeds this many times the mean of about the last "
        "hundred losses; above 1",
        rule=above(1),
        changes="later",
    )
    profile_steps: str | None = field(
        None,
        "first and last update to trace into model_dir/profile, counted from 1, such as 10:20",
        rule=_PROFILED,
        changes="nothing",
    )
    hang_seconds: float = field(
        600,
        "seconds without progress after which a line says what the run waits for, and a stack "
        "where; the run goes on; 0: never",
        rule=at_least(0),
        changes="nothing",
        read_if=OURS,
    )
    on_event: str | None = field(
        None,
        "shell command to run when the run starts, ends, fails, hangs, skips an update and so on "
        "(docs/training.md)",
        changes="nothing",
        read_if=OURS,
    )
    lengths: LengthsConfig = field(LengthsConfig, "Lengths of features", changes="batches")
    mixing: MixingConfig = field(
        MixingConfig, "Rates of a mixture's tasks", changes="batches", read_if=ON_CACHES
    )
    data: DataConfig = field(DataConfig, "Reading the cache")
    vocabulary: VocabularyConfig = field(
        VocabularyConfig, "The vocabulary that tasks and caches must have", changes="nothing"
    )
    optimizer: OptimizerConfig = field(
        OptimizerConfig, "The optimizer and its learning-rate schedule"
    )
    loss: LossConfig = field(LossConfig, "The loss, in T5X's terms")
    checkpoint: CheckpointConfig = field(
        CheckpointConfig, "Saving and keeping checkpoints", changes="nothing"
    )
    evaluation: EvaluationConfig = field(
        EvaluationConfig, "Evaluation on the validation split during training", changes="nothing"
    )
    stopping: StoppingConfig = field(StoppingConfig, "Early stopping")
    plateau: PlateauConfig = field(PlateauConfig, "Lower rates when evaluations stop improving")
    metrics: MetricsConfig = field(MetricsConfig, "Training metrics", changes="nothing")
    mesh: MeshConfig = field(MeshConfig, "Division of the work among devices", changes="rounding")
    processes: ProcessesConfig = field(ProcessesConfig, "Several machines", changes="rounding")

    def __post_init__(self) -> None:
        check(self)
        field_paths.check_pattern("Config.trainable", self.trainable)
        check_watched(self)
        rule = f"at most {self.train_steps}, the last of train_steps"
        known = self.train_tokens is None
        inside = self.profiled.stop <= self.train_steps + 1
        require(inside or not known, "Config.profile_steps", self.profile_steps, rule)
        last = self.data.skips.batch(self.train_steps)
        rule = f"ranges that begin up to batch {last}, the last that --train_steps reads"
        begin = all(first <= last for first, _ in self.data.skips.ranges)
        require(begin or not known, "Config.data.skip", self.data.skip, rule)
        alone = self.branch_from is None or self.init_from is None
        rule = "left out if init_from is set: either is the beginning of the run"
        require(alone, "Config.branch_from", self.branch_from, rule)

    def entries(self, slot: str) -> list[Any]:
        """Imports and returns the entries of a slot whose annexes' settings of that name are on."""
        return [annexes.get(slot, name) for name in self.names_on(slot)]

    def names_on(self, slot: str) -> list[str]:
        """Returns the names of a slot's entries whose annexes' settings are on."""
        return [name for name in annexes.entries(slot) if getattr(self, name).on]

    @property
    def data_scheme(self) -> str:
        """Who makes the batches, "NAME" of --task=NAME:TASK; "" if they come from caches."""
        found = re.match(r"(\w+):", self.task)
        return found[1] if found else ""

    @property
    def is_divided(self) -> bool:
        return self.microbatches > 1 or self.tokens_per_microbatch_per_replica is not None

    @property
    def phases(self) -> Phases:
        """The rows of each batch; needs the schedule in updates (`phases.in_updates`)."""
        return phases_of(self)

    @property
    def branch(self) -> tuple[str, int] | None:
        """The folder and the step that the run branched from."""
        if self.branch_from is None:
            return None
        folder, _, step = self.branch_from.rpartition("@")
        return folder, int(step)

    @property
    def profiled(self) -> range:
        """The updates to trace, counted from 1."""
        return _updates(self.profile_steps or "")


def _with_annexes(core: type) -> type:
    """Returns the configuration with a group of settings for each annex that has some."""
    groups = []
    annexes.reserve("settings", (group.name for group in dataclasses.fields(core)))
    for name, kind in annexes.loaded("settings", whole=True).items():
        words = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
        groups.append((name, kind, field(kind, words)))
    whole = dataclasses.make_dataclass("Config", groups, bases=(core,), frozen=True)
    whole.__module__, whole.__doc__ = __name__, core.__doc__
    return whole


if TYPE_CHECKING:
    Config = _Config
else:
    Config = _with_annexes(_Config)


def _updates(text: str) -> range:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    return range(max(1, int(found[1])), int(found[2]) + 1) if found else range(0)
