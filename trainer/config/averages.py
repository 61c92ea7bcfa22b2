"""Settings for averages of parameters, and the words of --average. No JAX."""

import dataclasses
import re
from typing import Any

from tasks.terminal.fields import INSIDE_ONE, Checked, ReadIf, Rule, at_least, field, require

EMA = "ema"
_LAST = re.compile(r"last:([1-9]\d{0,5})")
_LABEL = re.compile(r"\.(ema|last\d+)$")


def last_count(average: str) -> int | None:
    """Returns K of "last:K"; None for another average."""
    found = _LAST.fullmatch(average)
    return int(found[1]) if found else None


def label(split: str, average: str) -> str:
    """Returns the name of an average's results for SPLIT or SPLIT/TASK, as in "validation.ema"."""
    name, slash, task = split.partition("/")
    return f"{name}.{average.replace(':', '')}{slash}{task}"


def parts_of(split: str) -> list[str]:
    """Returns what follows the name in SPLIT, SPLIT.AVERAGE, SPLIT/TASK or SPLIT.AVERAGE/TASK."""
    name, _, task = split.partition("/")
    average = _LABEL.search(name)
    return [*([average[1]] if average else []), *([task] if task else [])]


# Keywords of the field `average` of commands that read a checkpoint.
OF_COMMANDS: dict[str, Any] = {
    "words": "use averaged parameters: ema, which --averages.ema_decay keeps, or last:K, the mean "
    "of the K newest checkpoints up to the step; by default the checkpoint's own parameters",
    "rule": Rule("ema or last:K, with K of 2 or more", lambda one: one == EMA or _several(one)),
}


def _several(average: str) -> bool:
    return (last_count(average) or 0) > 1


@dataclasses.dataclass(frozen=True)
class AveragesConfig(Checked):
    """An average of the parameters that is kept beside them during training.

    Source: Polyak and Juditsky 1992; Kingma and Ba 2014 (arXiv:1412.6980), sections 3 and 7.2, for
    the bias correction.
    """

    ema_decay: float | None = field(
        None,
        "keep a float32 exponential moving average of the trained parameters with this decay per "
        "update, above 0 and below 1, corrected for its start; evaluations during the run report "
        "it too; by default none is kept",
        rule=INSIDE_ONE,
    )
    ema_start_step: int = field(
        0,
        "number of first updates that the average leaves out; until then it is the parameters",
        rule=at_least(0),
        read_if=ReadIf(lambda config: config.ema_decay is not None, "without averages.ema_decay"),
    )


def check_averages(config: Any) -> None:
    """Rejects an average that never begins, and watched metrics of one that is not kept."""
    start = config.averages.ema_start_step
    rule = f"below {config.train_steps}, the train_steps, or the average never begins"
    known = config.train_tokens is None
    require(start < config.train_steps or not known, "Config.averages.ema_start_step", start, rule)
    if config.averages.ema_decay is not None:
        return
    for name in ("checkpoint.best_metric", "stopping.metric", "plateau.metric"):
        part, _, attribute = name.partition(".")
        metric = getattr(getattr(config, part), attribute)
        watched = (metric or "").removeprefix("min:").removeprefix("max:").startswith(f"{EMA}/")
        rule = f"a metric without {EMA}/, since --averages.ema_decay is not set"
        require(not watched, f"Config.{name}", metric, rule)
