"""Settings of checkpoints and evaluations, and of actions on their results. No JAX."""

import dataclasses
from collections import Counter

from tasks.metrics.metric import METRICS, values_of
from tasks.terminal.fields import (
    BELOW_ONE,
    REQUIRED,
    ReadIf,
    Rule,
    at_least,
    check,
    field,
    one_of,
    require,
)
from trainer.config.decoding import Decoding
from trainer.config.processes import SEVERAL_HOSTS, ProcessesConfig

_ON_DAMAGE = ("stop", "fall_back")
# Metrics of every evaluation, or of every language model's, that can rank checkpoints.
BEST_METRICS = ("loss", "perplexity", "accuracy", "bits_per_byte")
# Evaluation values computed by the trainer itself -> whether lower is better.
LOWER_IS_BETTER = {
    **dict.fromkeys(("loss", "training_loss", "perplexity", "bits_per_byte"), True),
    **dict.fromkeys(("word_perplexity", "order_loss", "auxiliary_loss", "dropped_tokens"), True),
    **dict.fromkeys(("accuracy", "sequence_accuracy", "order_accuracy"), False),
    **{"probe_perplexity": True, "probe_accuracy": False},
}
_WATCHED = (
    f"a metric is one of {', '.join(BEST_METRICS)}, of evaluation.metrics, or of a task as "
    "TASK/METRIC; min:METRIC and max:METRIC say which way one is better that does not say so itself"
)
# The value of evaluation.metrics for the task's own.
TASK_METRICS = "task"
_BELOW_ONE = Rule("above 0 and below 1", lambda value: 0 < value < 1)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Settings of saving and keeping checkpoints. The last update is always saved."""

    every_steps: int = field(
        1000,
        "updates between checkpoints; 0: only at the end of the run",
        rule=at_least(0),
        often="updates between checkpoints",
    )
    keep: int | None = field(
        3,
        "number of newest checkpoints to keep, 1 or more; None: all",
        rule=at_least(1),
        often="newest checkpoints to keep",
    )
    keep_every_steps: int | None = field(
        None,
        "also keep every checkpoint whose step is a multiple of this, permanently",
        rule=at_least(1),
        read_if=ReadIf(
            lambda config: config.keep is not None,
            "with --checkpoint.keep=None, which keeps every checkpoint",
        ),
    )
    best_metric: str | None = field(
        None,
        "also keep the checkpoint with the best validation value of this metric; an evaluation "
        f"that improves on all before it is followed by a checkpoint; {_WATCHED}",
        often="also keep the best checkpoint by this metric",
    )
    on_damage: str = field(
        "stop",
        "what to do if the newest checkpoint is damaged; stop = name the newest intact one and "
        "end, fall_back = rename the damaged one to damaged_checkpoint_STEP and resume from the "
        "newest intact one",
        choices=_ON_DAMAGE,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the validation split during training.

    The result does not depend on the batch size, except with Switch layers, where groups of rows
    (up to 1,024 tokens together) share the capacity of each expert.
    """

    every_steps: int = field(
        1000,
        "updates between evaluations on the validation split; the last update is also evaluated; "
        "0: never",
        rule=at_least(0),
        often="updates between evaluations",
    )
    batch_size: int | None = field(
        None, "rows of an evaluation batch; None: as in training", rule=at_least(1)
    )
    batches: int | None = field(
        None,
        "number of batches of each task to evaluate, from the beginning (T5X's eval_steps); None: "
        "the whole split",
        rule=at_least(1),
    )

    metrics: tuple[str, ...] = field(
        (TASK_METRICS,),
        "metrics of generated text to compute as well, as exact_match,character_error_rate; task "
        "= the task's own, such as seqio's metric_fns; empty: none",
        often="metrics of generated text",
    )
    supervised: str | None = field(
        None,
        "one of T5's supervised tasks, as glue_mrpc, whose postprocessing and metrics judge "
        "predictions on caches of pairs; None: texts are compared",
        read_if=ReadIf(
            lambda config: not config.reads_seqio,
            lambda config: f"on --task={config.task}",
            whole=True,
        ),
    )
    examples: int | None = field(
        None,
        "maximum number of examples of each task to generate text for, from the beginning; None: "
        "the whole split",
        rule=at_least(1),
    )
    decoding: Decoding = field(
        Decoding,
        "Generation of predictions; max_new_tokens is lengths.targets unless set",
        unread={
            "batch_size": "on predictions, which have the rows of --evaluation.batch_size",
            "prefix": "on prompts, which are read as the task's inputs are in training",
        },
    )
    probes: str | None = field(
        None,
        'JSON lines with probes to score at each evaluation: {"text": …} for its perplexity, '
        '{"cloze": "… {} …", "choices": […], "answer": 0} for the most likely choice',
    )

    def __post_init__(self) -> None:
        check(self)
        names = Counter(each for metric in self.metrics for each in values_of(metric))
        require(
            all(count == 1 for count in names.values()),
            "EvaluationConfig.metrics",
            ",".join(self.metrics),
            "metrics whose values have different names: "
            + ", ".join(name for name, count in names.items() if count > 1)
            + " comes twice",
        )


@dataclasses.dataclass(frozen=True)
class StoppingConfig:
    """Early stopping after evaluations that do not improve a metric."""

    metric: str | None = field(
        None, f"end the run when this metric stops improving; {_WATCHED}; None: never"
    )
    patience: int = field(
        3,
        "number of consecutive evaluations without an improvement after which the run ends",
        rule=at_least(1),
    )
    min_delta: float = field(
        0.0,
        "minimum difference from the best value that counts as an improvement",
        rule=at_least(0),
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class PlateauConfig:
    """Learning-rate drops after evaluations that do not improve a metric."""

    metric: str | None = field(
        None, f"lower the learning rate when this metric stops improving; {_WATCHED}; None: never"
    )
    patience: int = field(
        2,
        "number of consecutive evaluations without an improvement, counted from the best value or "
        "the last drop, after which the rate is lowered",
        rule=at_least(1),
    )
    min_delta: float = field(
        0.0, "least difference from the best value that is an improvement", rule=at_least(0)
    )
    factor: float = field(
        0.5,
        "factor by which each drop multiplies the schedule, above 0 and below 1",
        rule=_BELOW_ONE,
    )
    minimum_share: float = field(
        0.01, "lower limit of the product of all drops, in [0, 1)", rule=BELOW_ONE
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Flags of trainer.evaluate."""

    model_dir: str = field(REQUIRED, "folder of the run, local or remote")
    steps: str = field(
        "latest",
        "checkpoints to evaluate: all, latest, or steps separated by commas",
        aliases=("checkpoints",),
    )
    split: str = field("validation", "split of the cache to evaluate on")
    output: str | None = field(
        None,
        "file to write the metrics to, as JSON lines if its name ends in .jsonl, else as JSON; "
        "None: add them to MODEL_DIR/evaluation.json",
        metavar="FILE",
    )
    plot: str | None = field(None, "PNG to write, of the metrics over steps", metavar="FILE")
    task: str | None = field(None, "task to evaluate on, or task=rate,task=rate; None: the run's")
    task_module: str | None = field(None, "Python module that registers tasks and metrics")
    metrics: str | None = field(
        None, "metrics of generated text, as exact_match,bleu; task: the task's own"
    )
    supervised: str | None = field(
        None, "one of T5's tasks, as glue_mrpc, whose metrics judge predictions on a cache"
    )
    examples: int | None = field(
        None,
        "maximum number of examples of each task to generate text for; None: the run's",
        rule=at_least(1),
    )
    probes: str | None = field(
        None, "JSON lines with probes to score (docs/finetuning.md)", metavar="FILE"
    )
    cache_dir: str | None = field(None, "folder of the caches, if they have moved since training")
    batch_size: int | None = field(
        None,
        "rows per batch; None: the run's. Only models with Switch layers have other metrics with "
        "another batch size",
        rule=at_least(1),
    )
    processes: ProcessesConfig = field(ProcessesConfig, SEVERAL_HOSTS)


def check_watched(
    checkpoint: CheckpointConfig,
    stopping: StoppingConfig,
    plateau: PlateauConfig,
    evaluation: EvaluationConfig,
    task: str,
    task_module: str | None,
) -> None:
    """Rejects watched metrics that are never evaluated, as far as is known without the data."""
    # Metrics of tasks, user modules and probes are known once these are loaded.
    others = task.startswith("seqio:") or task_module is not None or evaluation.probes is not None
    others |= evaluation.supervised is not None
    others |= not METRICS.keys() >= {*evaluation.metrics} - {TASK_METRICS}
    known = BEST_METRICS + tuple(each for name in evaluation.metrics for each in values_of(name))
    for path, watched in (
        ("checkpoint.best_metric", checkpoint.best_metric),
        ("stopping.metric", stopping.metric),
        ("plateau.metric", plateau.metric),
    ):
        if watched is None:
            continue
        require(
            evaluation.every_steps > 0,
            f"Config.{path}",
            watched,
            "unset without evaluations: set evaluation.every_steps above 0",
        )
        name = watched.removeprefix("min:").removeprefix("max:").rpartition("/")[2]
        require(
            name in known or (others and name != "" and ":" not in name),
            f"Config.{path}",
            watched,
            f"{one_of(known)}; others need evaluation.metrics or evaluation.probes",
        )
