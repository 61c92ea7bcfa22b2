"""The record of a run, for reports: configuration, tasks, metrics, evaluations, software."""

import bisect
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import Config, field_paths, load_config, load_record
from trainer.config.phases import Phase
from trainer.monitoring import goodput
from trainer.reporting.metrics import EVALUATION_FILE, read_metrics
from trainer.reporting.software import read_software

TRAIN, VALIDATION = "train", "validation"


@dataclasses.dataclass(frozen=True)
class Points:
    """Values of one metric of one split, by ascending step; NaN where training wrote NaN."""

    steps: list[int]
    values: list[float]


@dataclasses.dataclass
class History:
    """The records of a run.

    `name` is the run's name in the report, `origins` has the origin of each field that is not at
    its default, `record` is from `load_record`, `lines` from metrics.jsonl, `evaluations` (step ->
    split -> metric -> value) from trainer.evaluate; `missing` says which records are missing;
    `processes` is from goodput.json.
    """

    name: str
    folder: str
    config: Config
    origins: dict[str, str]
    record: dict[str, Any]
    lines: list[dict[str, Any]]
    evaluations: dict[int, dict[str, dict[str, float]]]
    software: dict[str, Any]
    missing: list[str]
    processes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def points(self, split: str, metric: str, part: str = "metrics") -> Points:
        """Returns the values of a metric; `part` is "speed" for the speed of training."""
        found: dict[int, float] = {}
        if part == "metrics":
            found = {
                step: splits[split][metric]
                for step, splits in self.evaluations.items()
                if _is_number(splits.get(split, {}).get(metric))
            }
        for line in self.lines:
            value: Any = line.get(part, {}).get(metric) if line["split"] == split else None
            if _is_number(value):
                found[line["step"]] = value
        return Points(sorted(found), [found[step] for step in sorted(found)])

    def last(self, split: str, metric: str, part: str = "metrics") -> float | None:
        """Returns the latest value of a metric; None if it has no values."""
        values = self.points(split, metric, part).values
        return values[-1] if values else None

    def names(self) -> dict[str, list[str]]:
        """Returns split -> metric names, in the order written."""
        found: dict[str, dict[str, None]] = {}
        lines = ((line["split"], line["metrics"]) for line in self.lines)
        evaluated = (each for splits in self.evaluations.values() for each in splits.items())
        for split, values in itertools.chain(lines, evaluated):
            found.setdefault(split, {}).update(dict.fromkeys(values))
        return {split: list(values) for split, values in found.items()}

    @property
    def environment(self) -> dict[str, Any]:
        """Name -> value: the commit, the versions and the hardware at the last start."""
        found = self.software
        versions, hardware = found.get("versions", {}), found.get("hardware", {})
        return {"commit": found.get("commit"), **versions, **hardware}

    @property
    def step(self) -> int:
        """The last step with a line of metrics."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def tokens_per_step(self) -> float:
        """Encoder and decoder positions per step, padding included."""
        rates = [
            speed["tokens_per_second"] / speed["steps_per_second"]
            for line in self.lines
            if (speed := line.get("speed", {})).get("steps_per_second")
            and "tokens_per_second" in speed
        ]
        planned = self._positions(self.config.phases.phases[0])
        return round(statistics.median(rates)) if rates else planned

    def tokens(self, step: int) -> float:
        """Returns the encoder and decoder positions in all updates up to `step`."""
        phases = self.config.phases
        if len(phases.phases) == 1:
            return step * self.tokens_per_step
        return phases.weighted(self._positions).read(step)

    def _positions(self, phase: Phase) -> int:
        """Returns the positions of a batch; encoders predict in place, without a second side."""
        targets = phase.lengths.targets if self.config.model.has_decoder else 0
        return phase.rows * (phase.lengths.inputs + targets)

    def hours(self, steps: Sequence[int]) -> list[float]:
        """Returns the training hours before each of the ascending steps, from recorded speeds."""
        return [_between(self._clock, step) / 3600 for step in steps]

    @functools.cached_property
    def _clock(self) -> list[tuple[int, float]]:
        """(step, seconds of training before it) for each record of speed."""
        rates = self.points(TRAIN, "steps_per_second", "speed")
        known = [(0, 0.0)]
        for step, rate in zip(rates.steps, rates.values, strict=True):
            before, seconds = known[-1]
            if rate > 0:
                known.append((step, seconds + (step - before) / rate))
        return known

    def blocked(self) -> tuple[float, float]:
        """Returns how many seconds checkpoints blocked training and how many it took in all."""
        waits = self.points(TRAIN, "checkpoint_blocking_seconds", "speed").values
        return sum(waits), 3600 * self.hours([self.step])[0]


def load(folder: str, name: str) -> History:
    """Returns a run's records; raises UserError if the run is missing or a file is damaged."""
    config, origins = load_config(folder)
    lines = read_metrics(folder)
    evaluations = _evaluations(files.join(folder, EVALUATION_FILE))
    software = read_software(folder)
    splits = {line["split"] for line in lines}
    missing = []
    if TRAIN not in splits:
        missing.append("no training metrics yet: let it train longer")
    if not evaluations and not any(split.startswith(VALIDATION) for split in splits):
        missing.append("no validation metrics yet: set --evaluation.every_steps above 0")
    if not software:
        missing.append("no record of software and hardware")
    values = [value for line in lines for value in line["metrics"].values() if _is_number(value)]
    if bad := sum(not math.isfinite(value) for value in values):
        missing.append(f"{bad:,} values are not finite, which leaves gaps")
    record = load_record(folder)
    processes = goodput.read(files.join(folder, goodput.GOODPUT_FILE))
    return History(
        name, folder, config, origins, record, lines, evaluations, software, missing, processes
    )


def _evaluations(path: str) -> dict[int, Any]:
    """Returns trainer.evaluate's results as step -> results by split; {} without a file."""
    if not files.exists(path):
        return {}
    value = files.read_json(path)
    try:
        return {int(step): dict(splits) for step, splits in value["checkpoints"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not what trainer.evaluate writes: delete it") from error


def load_all(folders: Sequence[str]) -> list[History]:
    """Returns the records of runs, each named by the distinguishing part of its path."""
    parts = [folder.rstrip("/").split("/") for folder in folders]
    for one, other in itertools.combinations(parts, 2):
        if one == other:
            raise UserError(f"{'/'.join(one)} is named twice: name each run once")
    while len(parts) > 1 < min(map(len, parts)) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]  # "a/model" and "b/model" are a and b
    for length in itertools.count(1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return [load(folder, name) for folder, name in zip(folders, names, strict=True)]


def differences(histories: Sequence[History]) -> list[tuple[str, list[Any]]]:
    """Returns (field path, value or "–" in each run) for differing fields, except model_dir."""
    leaves = [dict(field_paths.leaves(history.config)) for history in histories]
    paths = dict.fromkeys(path for leaf in leaves for path in leaf)
    rows = [(path, [leaf.get(path, "–") for leaf in leaves]) for path in paths]
    return [
        (path, values)
        for path, values in rows
        if path != "model_dir" and any(value != values[0] for value in values)
    ]


def _between(known: Sequence[tuple[int, float]], step: int) -> float:
    """Interpolates or extrapolates the value at `step` from known points."""
    if len(known) == 1:
        return known[0][1]
    later = min(max(bisect.bisect_left(known, (step,)), 1), len(known) - 1)
    (start, low), (end, high) = known[later - 1], known[later]
    return low + (high - low) * (step - start) / (end - start)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
