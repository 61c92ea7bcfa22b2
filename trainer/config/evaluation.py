"""Settings for checkpoints, evaluations and actions triggered by results. No JAX."""

import dataclasses
import operator
from collections import Counter
from typing import Any, ClassVar

from tasks import annexes
from tasks.metrics.metric import METRICS, values_of
from tasks.terminal.flag_fields import (
    BELOW_ONE,
    INSIDE_ONE,
    REQUIRED,
    Checked,
    ReadIf,
    at_least,
    check,
    field,
    one_of,
    require,
)
from trainer.config import averages
from trainer.config.data import ON_CACHES
from trainer.config.decoding import Decoding
from trainer.config.processes import SEVERAL_HOSTS, ProcessesConfig

_ON_DAMAGE = ("stop", "fall_back")
# Metrics that can rank checkpoints and that every evaluation, or every language model's, computes.
BEST_METRICS = ("loss", "perplexity", "accuracy", "bits_per_byte")
# Evaluation values computed by the trainer itself -> whether lower is better.
LOWER_IS_BETTER = {
    **dict.fromkeys(("loss", "training_loss", "perplexity", "bits_per_byte"), True),
    **dict.fromkeys(("word_perplexity", "order_loss", "auxiliary_loss", "dropped_tokens"), True),
    **dict.fromkeys(("accuracy", "sequence_accuracy", "order_accuracy"), False),
    **{name: better == "min" for name, better in annexes.entries("watched").items()},
}
_WATCHED = (
    f"metrics are {', '.join(BEST_METRICS)}, those in evaluation.metrics, and TASK/METRIC for one "
    "task; min:METRIC or max:METRIC says which direction is better if the metric does not"
)
# Value of evaluation.metrics that stands for the task's own metrics.
TASK_METRICS = "task"
_MIN_DELTA = "smallest change from the best value that counts as an improvement"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Settings for saving and keeping checkpoints. The last update is always saved."""

    every_steps: int = field(
        1000,
        "updates between checkpoints; 0: only at the end of the run",
        rule=at_least(0),
        often="updates between checkpoints",
    )
    keep: int | None = field(
        3,
        "number of newest checkpoints to keep, 1 or more; None: all of them",
        rule=at_least(1),
        often="newest checkpoints to keep",
    )
    keep_every_steps: int | None = field(
        None,
        "keep checkpoints whose step is a multiple of this permanently",
        rule=at_least(1),
        read_if=ReadIf(
            lambda config: config.keep is not None,
            "with --checkpoint.keep=None, which keeps every checkpoint",
        ),
    )
    best_metric: str | None = field(
        None,
        "also keep the checkpoint with the best validation value of this metric, and save one "
        f"after each evaluation that improves it; {_WATCHED}",
        often="also keep the best checkpoint by this metric",
    )
    on_damage: str = field(
        "stop",
        "what to do if the newest checkpoint is damaged: stop names the newest intact one and "
        "ends the run; fall_back renames the damaged one to damaged_checkpoint_STEP and resumes "
        "from the newest intact one",
        choices=_ON_DAMAGE,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the validation split during training.

    The result does not depend on the batch size, except where rows of a batch depend on one
    another, as those that share the capacity of an expert do.
    """

    every_steps: int = field(
        1000,
        "updates between evaluations on the validation split; the last update is evaluated too; "
        "0: never",
        rule=at_least(0),
        often="updates between evaluations",
    )
    batch_size: int | None = field(
        None, "rows per evaluation batch; None: as in training", rule=at_least(1)
    )
    batches: int | None = field(
        None,
        "number of batches per task to evaluate, from the start of the split (T5X's eval_steps); "
        "None: the whole split",
        rule=at_least(1),
    )
    metrics: tuple[str, ...] = field(
        (TASK_METRICS,),
        "metrics of generated text, such as exact_match,character_error_rate; task stands for the "
        "task's own metrics (seqio's metric_fns); empty: none",
        often="metrics of generated text",
    )
    supervised: str | None = field(
        None,
        "supervised task whose postprocessing and metrics judge predictions on caches of pairs "
        "(docs/finetuning.md); None: texts are compared",
        read_if=ON_CACHES,
    )
    examples: int | None = field(
        None,
        "maximum number of examples per task to generate text for, from the start of the split; "
        "None means all",
        rule=at_least(1),
    )
    decoding: Decoding = field(
        Decoding,
        "Generating predictions; max_new_tokens defaults to lengths.targets",
        unread={
            "batch_size": "on predictions, which use --evaluation.batch_size",
            "prefix": "on prompts, which are read like the task's inputs in training",
        },
    )

    def __post_init__(self) -> None:
        check(self)
        names = Counter(each for metric in self.metrics for each in values_of(metric))
        twice = ", ".join(name for name, count in names.items() if count > 1)
        rule = f"metrics whose values have different names, but {twice} occurs twice"
        require(not twice, "EvaluationConfig.metrics", ",".join(self.metrics), rule)


@dataclasses.dataclass(frozen=True)
class StoppingConfig(Checked):
    """Early stopping after evaluations that do not improve a metric."""

    metric: str | None = field(
        None, f"end the run when this metric stops improving; {_WATCHED}; None: never end early"
    )
    patience: int = field(
        3,
        "end after this many evaluations in a row without improvement; with more, a run that has "
        "ended goes on",
        rule=at_least(1),
        changes="later",
    )
    min_delta: float = field(0.0, _MIN_DELTA, rule=at_least(0))


@dataclasses.dataclass(frozen=True)
class PlateauConfig(Checked):
    """Learning-rate drops after evaluations that do not improve a metric."""

    metric: str | None = field(
        None, f"lower the learning rate when this metric stops improving; {_WATCHED}; None: keep it"
    )
    patience: int = field(
        2,
        "lower the rate after this many evaluations in a row without improvement, counted from "
        "the best value or the last drop",
        rule=at_least(1),
    )
    min_delta: float = field(0.0, _MIN_DELTA, rule=at_least(0))
    factor: float = field(
        0.5, "factor that each drop applies to the schedule, above 0 and below 1", rule=INSIDE_ONE
    )
    minimum_share: float = field(
        0.01, "lower limit on the product of drops, in [0, 1)", rule=BELOW_ONE
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Flags of trainer.evaluate."""

    ANNEXES: ClassVar[str] = "flags.evaluate"

    model_dir: str = field(REQUIRED, "folder of the run, local or remote", bare=True)
    steps: str = field(
        "latest",
        "checkpoints to evaluate: all, latest, or steps separated by commas",
        joined=",",
        aliases=("step", "checkpoints"),
    )
    average: str | None = field(None, **averages.OF_COMMANDS)
    split: str = field("validation", "split of the cache to evaluate on")
    output: str | None = field(
        None,
        "file for the metrics, as JSON lines if its name ends in .jsonl, otherwise as JSON; None: "
        "add them to MODEL_DIR/evaluation.json",
        metavar="FILE",
    )
    plot: str | None = field(None, "PNG file for a plot of the metrics by step", metavar="FILE")
    task: str | None = field(
        None, "task to evaluate on, or task=rate,task=rate; None: the run's", joined=","
    )
    task_module: str | None = field(None, "Python module that registers tasks and metrics")
    metrics: str | None = field(
        None,
        "metrics of generated text, such as exact_match,bleu; task: the task's own",
        joined=",",
    )
    supervised: str | None = field(None, "supervised task that judges predictions")
    examples: int | None = field(
        None,
        "maximum number of examples per task; None means the run's",
        rule=at_least(1),
    )
    cache_dir: str | None = field(None, "folder of the caches, if they have moved since training")
    batch_size: int | None = field(
        None,
        "rows per batch; metrics depend on it only with experts; None: the run's",
        rule=at_least(1),
    )
    processes: ProcessesConfig = field(ProcessesConfig, SEVERAL_HOSTS)


# Fields that name a metric of evaluations.
WATCHED = ("checkpoint.best_metric", "stopping.metric", "plateau.metric")


def check_watched(config: Any) -> None:
    """Rejects watched metrics that are never evaluated, where this is clear without the data."""
    evaluation = config.evaluation
    # Metrics of tasks, user modules and annexes are known only after these are loaded.
    others = not METRICS.keys() >= {*evaluation.metrics} - {TASK_METRICS}
    others |= any((config.data_scheme, config.task_module, evaluation.supervised))
    others |= any(getattr(config, name).on for name in annexes.entries("evaluations"))
    known = BEST_METRICS + tuple(each for name in evaluation.metrics for each in values_of(name))
    for path in WATCHED:
        watched = operator.attrgetter(path)(config)
        if watched is None:
            continue
        rule = "unset without evaluations: set evaluation.every_steps above 0"
        require(evaluation.every_steps > 0, f"Config.{path}", watched, rule)
        name = watched.removeprefix("min:").removeprefix("max:").rpartition("/")[2]
        needed = " or ".join(("evaluation.metrics", *annexes.entries("evaluations")))
        rule = f"{one_of(known)}; others need {needed}"
        may_be = others and name != "" and ":" not in name
        require(name in known or may_be, f"Config.{path}", watched, rule)
