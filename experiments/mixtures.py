"""Draws mixtures for a sweep, fits a law to its losses, and finds the best mixture.

    python -m experiments.mixtures draw web_ul2=0.6,books_ul2=0.3,code_ul2=0.1 --number=20
    python -m experiments.mixtures fit SWEEP [--targets=books_ul2] [--against=SWEEP]

`draw` prints random mixtures around one, for --axis=task='…' of experiments.sweep. `fit` reads the
folder of such a sweep and fits a law over shares r to a metric of each target: c + exp(Σ t_j r_j),
or c + (Σ a_j r_j)^-β. It prints the law, its error for mixtures left out, and the mixture with the
lowest mean over the targets; --against compares predictions with another sweep's runs. Runs that do
not identify the law are refused, with exit code 2.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from experiments.sweeps.curves import Spread
from tasks import mixture
from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import REQUIRED, at_least, field
from tasks.terminal.table import table

if TYPE_CHECKING:
    from experiments.laws.mixture import MixtureFit

# Shares of a mixture -> the targets' losses in each of its runs.
_Runs = dict[tuple[float, ...], list[list[float]]]

_FORMS = ("exponential", "power")
_NUMBER = 20
_METRIC = "bits_per_byte"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    what: str = field(
        REQUIRED,
        "draw: print random mixtures; fit: fit the law and print the best mixture",
        choices=("draw", "fit"),
        positional=True,
    )
    source: str = field(
        REQUIRED,
        "mixture to draw around, as TASK=RATE,TASK=RATE, or folder of a sweep over task",
        positional=True,
    )
    number: int | None = field(
        None, f"with draw: number of mixtures; None means {_NUMBER}", rule=at_least(1)
    )
    seed: int | None = field(None, "with draw: seed; None means 0", rule=at_least(0))
    form: str | None = field(
        None,
        "with fit: the law; None means the one with the lower error for mixtures left out",
        choices=_FORMS,
    )
    metric: str | None = field(None, f"with fit: metric of targets; None means {_METRIC}")
    targets: str | None = field(
        None, "with fit: tasks whose mean should be low; None means all", metavar="TASK,TASK"
    )
    against: str | None = field(
        None, "with fit: folder of a sweep whose losses to compare", metavar="DIR"
    )


def run(flags: Flags) -> None:
    """Draws or fits."""
    other = ("form", "metric", "targets", "against") if flags.what == "draw" else ("number", "seed")
    for name in other:
        if getattr(flags, name) is not None:
            raise UserError(f"--{name} has no effect on {flags.what}: leave it out")
    if flags.what == "draw":
        _draw(flags)
    else:
        _fit(flags)


def _draw(flags: Flags) -> None:
    import numpy as np

    from experiments.laws import mixture as law

    around = _shares(flags.source)
    number = flags.number or _NUMBER
    # Rounded, some are equal; each would cost a run.
    drawn = law.draw(np.array([*around.values()]), 8 * number, flags.seed or 0)
    texts = [*dict.fromkeys(_text(list(around), shares) for shares in drawn)][:number]
    if len(texts) < number:
        raise UserError(
            f"{flags.source}: only {len(texts)} of {number} mixtures differ after rounding to "
            "hundredths: draw fewer, or around a mixture without tiny shares"
        )
    print(";".join(texts))


def _fit(flags: Flags) -> None:
    import numpy as np

    from experiments.laws import mixture as law

    metric = flags.metric or _METRIC
    tasks, targets, runs = _read(flags.source, metric, flags.targets)
    others = _read(flags.against, metric, flags.targets, tasks)[2] if flags.against else {}
    shares, losses = [*runs], [np.mean(each, axis=0) for each in runs.values()]
    fits = {
        form: law.fit(law.FORMS[form], np.array(shares), np.array(losses))
        for form in ([flags.form] if flags.form else _FORMS)
    }
    found = min(fits.values(), key=lambda each: each.error)
    print(f"{len(runs)} mixtures; {metric}, mean of {', '.join(targets)}: ", end="")
    print(f"standard deviation {found.losses.std():.4f}")
    rows = [[each.error, each.rank_correlation] for each in fits.values()]
    _print(("law", "error of mixtures left out", "rank correlation"), [*fits], rows)
    if found.refusal:
        raise UserError(f"{flags.source}: {found.refusal}")
    constants = [*found.form.scalars, *(f"{found.form.vector} of {task}" for task in tasks)]
    _print(("target", *constants), targets, found.laws)
    best = found.best()
    _print(("task", "best share", "2.5 %", "97.5 %"), tasks, zip(*best, strict=True))
    _print(
        ("mixture", "predicted", "2.5 %", "97.5 %"), [_text(tasks, best[0])], [found.at(best[0])]
    )
    if others:
        _compare(found, tasks, others)


def _compare(found: "MixtureFit", tasks: list[str], others: _Runs) -> None:
    import numpy as np

    rows = []
    for shares, losses in others.items():
        value, low, high = found.at(np.array(shares))
        measured = Spread.of([float(np.mean(each)) for each in losses])
        row = (f"{value:.4f}", f"{low:.4f} to {high:.4f}", measured.shown())
        rows.append((_text(tasks, shares), *row, f"{measured.mean - value:+.4f}"))
    header = ("mixture", "predicted", "95 % of a run", "measured", "minus predicted")
    print(f"\n{table(header, rows, markdown=True)}")


def _print(header: Sequence[str], names: list[str], rows: Iterable[Sequence[float]]) -> None:
    shown = [
        (name, *(f"{value:.4f}" for value in row)) for name, row in zip(names, rows, strict=True)
    ]
    print(f"\n{table(header, shown, markdown=True)}")


def _text(tasks: list[str], shares: Iterable[float]) -> str:
    # A rate of 0 is not a rate.
    rounded = (max(round(float(share), 2), 0.01) for share in shares)
    return ",".join(f"{task}={share:g}" for task, share in zip(tasks, rounded, strict=True))


def _shares(text: str) -> dict[str, float]:
    rates = dict(mixture.parse(text).tasks)
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if len(known) < max(2, len(rates)):
        raise UserError(f"{text}: give two tasks or more with their rates, as TASK=RATE,TASK=RATE")
    return {name: rate / sum(known.values()) for name, rate in known.items()}


def _read(
    folder: str, metric: str, chosen: str | None, tasks: Sequence[str] = ()
) -> tuple[list[str], list[str], _Runs]:
    """Returns the tasks, the targets, and the finished runs of a sweep by shares of the tasks."""
    from trainer.checkpoints.early_stopping import lower_is_better, value_of

    if not lower_is_better("--metric", metric):
        raise UserError(f"--metric={metric} is better when higher, but the law is of a loss")
    path = files.join(folder, "results.jsonl")
    try:
        lines = [json.loads(line) for line in files.read_lines(path)]
    except ValueError as error:
        raise UserError(f"{path} has a line that is not JSON: run its sweep again") from error
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is not the folder of a sweep: it has no results.jsonl"
        ) from error
    runs: _Runs = {}
    for line in lines:
        values = line.get("values") if isinstance(line, dict) else None
        if not isinstance(values, dict):
            raise UserError(f"{path} has a line without values: run its sweep again")
        if [*values] != ["task"]:
            raise UserError(f"{path} must have the axis task alone")
        if "metrics" not in line:
            continue
        shares = _shares(values["task"])
        tasks = tasks or [*shares]
        if {*tasks} != {*shares}:
            raise UserError(f"{path} mixes {', '.join(shares)}, not {', '.join(tasks)}")
        losses = []
        for target in chosen.split(",") if chosen else tasks:
            name = f"{target}/{metric.removeprefix('min:')}"
            value = value_of("--metric", name, line["metrics"])
            if not isinstance(value, float) or value <= 0:
                raise UserError(
                    f"{path}: {values['task']} has {name} {value}, which no law fits: "
                    "delete its line"
                )
            losses.append(value)
        runs.setdefault(tuple(shares[task] for task in tasks), []).append(losses)
    if not runs:
        raise UserError(f"{path} has no finished run")
    return [*tasks], chosen.split(",") if chosen else [*tasks], runs


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
