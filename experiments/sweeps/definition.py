"""The definition of a sweep: a file in experiments/files, modified by flags."""

import dataclasses
import itertools
import pathlib
import string
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.terminal import toml_flags
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.texts import listed
from tasks.terminal.toml_flags import as_text, flat

FILES = pathlib.Path(__file__).parents[1] / "files"
OUTPUT = "output"
_KEYS = (
    *("title", "parameters", "prepare", "base", "then", "axes", "choices"),
    *("seeds", "metric", "baseline", "tune", "tune_seeds"),
)
Settings = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Choice:
    """An axis's value and its settings; `tries` limits the tuned axis's values (() for all)."""

    label: str
    settings: Settings
    tries: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a sweep: a field, a parameter, or a name for several that are set together."""

    name: str
    choices: tuple[Choice, ...]

    @property
    def names(self) -> set[str]:
        """The fields and parameters that the axis sets."""
        return {name for choice in self.choices for name in choice.settings}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep: every combination of the axes' values with every seed."""

    name: str  # name of the file, or "sweep"
    title: str = ""  # the question it answers
    # Values of {placeholders} in all other texts; each is a flag.
    parameters: Settings = dataclasses.field(default_factory=dict)
    # Commands for vocabularies and caches, run once per combination of their placeholders.
    prepare: tuple[str, ...] = ()
    # Flags of trainer.pretrain that all cells share.
    base: Settings = dataclasses.field(default_factory=dict)
    # Flags of a following trainer.finetune; empty skips it.
    then: Settings = dataclasses.field(default_factory=dict)
    axes: tuple[Axis, ...] = ()
    seeds: tuple[int, ...] = (0,)
    metric: str = "loss"  # the metric of the last evaluation to compare, as in metrics.jsonl
    # Axis -> label of the cells with which others are compared; {} for no comparison.
    baseline: Settings = dataclasses.field(default_factory=dict)
    tune: str = ""  # axis whose best value each combination of other axes takes; "" for none
    # How many of the seeds, from the first on, try all values of `tune`; the others run with the
    # best one only. None means all.
    tune_seeds: int | None = None

    def axis(self, name: str) -> Axis:
        """Returns the axis of this name, which must exist."""
        return next(axis for axis in self.axes if axis.name == name)

    @property
    def trial_seeds(self) -> tuple[int, ...]:
        """The seeds by which values of `tune` are chosen."""
        return self.seeds[: self.tune_seeds]

    def combinations(self) -> Iterator[tuple[Choice, ...]]:
        """Yields the combinations of the axes' values; the last axis changes fastest."""
        for choices in itertools.product(*(axis.choices for axis in self.axes)):
            pairs = zip(self.axes, choices, strict=True)
            tried = {choice.label for axis, choice in pairs if axis.name == self.tune}
            if all(tried <= {*choice.tries} for choice in choices if choice.tries):
                yield choices

    def shared(self) -> dict[str, Any]:
        """Returns the settings common to all cells of a folder, as JSON, without seeds and axes."""
        return {"parameters": self.parameters, "base": self.base, "then": self.then}


def read(name: str) -> Sweep:
    """Reads a sweep from a TOML file, given by its path or by its name in experiments/files."""
    path = pathlib.Path(name)
    if not name.endswith(".toml"):
        path = FILES / f"{name}.toml"
        if not path.exists():
            known = sorted(each.stem for each in FILES.glob("*.toml"))
            raise UserError(
                f"there is no experiment {name}{nearest(name, known)}: give a .toml file or one of "
                f"{', '.join(known)}"
            )
    value = toml_flags.read(path)
    try:
        return checked(_parsed(path.stem, value))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _parsed(name: str, value: Mapping[str, Any]) -> Sweep:
    for key in value:
        if key not in _KEYS:
            raise UserError(f"unknown key {key}{nearest(key, _KEYS)}; known: {', '.join(_KEYS)}")
    tables = {key: _table(value, key) for key in ("parameters", "base", "then", "axes", "choices")}
    tune = str(value.get("tune", ""))
    axes: list[Axis] = []
    # Keep the order of the file.
    for key in value:
        if key == "axes":
            for axis, values in flat(tables[key]).items():
                if not isinstance(values, list):
                    raise UserError(f"axes.{axis} must be a list of values")
                axes.append(
                    Axis(axis, tuple(Choice(as_text(v), {axis: as_text(v)}) for v in values))
                )
        elif key == "choices":
            axes += [_choices(axis, labels, tune) for axis, labels in tables[key].items()]
    tries = dict.fromkeys(text for axis in axes for choice in axis.choices for text in choice.tries)
    if tries and tune not in [axis.name for axis in axes]:
        ordered = sorted(tries, key=float) if all(map(is_number, tries)) else list(tries)
        axes.append(Axis(tune, tuple(Choice(text, {tune: text}) for text in ordered)))
    prepare, seeds = value.get("prepare", []), value.get("seeds", [0])
    if not (isinstance(prepare, list) and all(isinstance(each, str) for each in prepare)):
        raise UserError("prepare must be a list of commands")
    if not (isinstance(seeds, list) and all(type(seed) is int for seed in seeds)):
        raise UserError("seeds must be a list of whole numbers")
    baseline = value.get("baseline", {})
    if not isinstance(baseline, dict):
        if not axes:
            raise UserError("baseline is a value of an axis, but there is no axis")
        if len(axes) != 1:
            raise UserError(
                "baseline must be a table of axis = value, since there are several axes"
            )
        baseline = {axes[0].name: baseline}
    texts: dict[str, Any] = {
        key: str(value[key]) for key in ("title", "metric", "tune") if key in value
    }
    settings: dict[str, Any] = {key: _texts(tables[key]) for key in ("parameters", "base", "then")}
    lists: dict[str, Any] = {"prepare": tuple(prepare), "axes": tuple(axes), "seeds": tuple(seeds)}
    settings["tune_seeds"] = value.get("tune_seeds")
    return Sweep(name, **texts, **settings, **lists, baseline=_texts(baseline))


def _table(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key, {})
    if not isinstance(found, dict):
        raise UserError(f"{key} must be a table")
    return found


def _choices(name: str, labels: Any, tune: str) -> Axis:
    if not (isinstance(labels, dict) and all(isinstance(each, dict) for each in labels.values())):
        raise UserError(f"choices.{name} must have a table of fields for each label")
    choices = []
    for label, table in labels.items():
        settings = flat(table)
        # The values in a list for the tuned axis are tried one by one.
        tries = settings.pop(tune) if isinstance(settings.get(tune), list) else []
        texts = {field: as_text(value) for field, value in settings.items()}
        choices.append(Choice(label, texts, tuple(map(as_text, tries))))
    return Axis(name, tuple(choices))


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: as_text(value) for name, value in flat(table).items()}


def is_number(text: str) -> bool:
    """Returns True if a label is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def with_axis(sweep: Sweep, text: str) -> Sweep:
    """Returns the sweep with an axis set from NAME=A,B,…; values with commas are separated by ";".

    For an axis of named choices, these are the choices to run.
    """
    name, _, after = text.partition("=")
    values = listed(after)
    if not name or not all(values):
        raise UserError(f"--axis={text}: write it as optimizer.learning_rate=0.01,0.02")
    before = {axis.name: axis for axis in sweep.axes}
    choices = tuple(Choice(value, {name: value}) for value in values)
    if name in before and before[name].names != {name}:
        known = {choice.label: choice for choice in before[name].choices}
        for value in values:
            if value not in known:
                hint = nearest(value, known) or f"; it has {', '.join(known)}"
                raise UserError(f"--axis={text}: {name} has no {value}{hint}")
        choices = tuple(known[value] for value in values)
    base = {field: value for field, value in sweep.base.items() if field != name}
    axes = list((before | {name: Axis(name, choices)}).values())
    if name == sweep.tune:  # for every combination, even if it lists its own
        axes = [
            Axis(axis.name, tuple(dataclasses.replace(each, tries=()) for each in axis.choices))
            for axis in axes
        ]
    return dataclasses.replace(sweep, axes=tuple(axes), base=base)


def with_flags(sweep: Sweep, flags: list[str]) -> Sweep:
    """Returns the sweep with parameters, and fields of all cells, set from --name=value."""
    parameters, base, then = dict(sweep.parameters), dict(sweep.base), dict(sweep.then)
    given: dict[str, str] = {}
    for flag in flags:
        name, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--"):
            raise UserError(f"{flag}: write flags as --name=value; the FILE comes first")
        if not equals:
            raise UserError(f"--{name} needs a value: write --{name}=…")
        if given.setdefault(name, value) != value:
            raise UserError(f"--{name}={given[name]} and {flag}: give one of them")
        for axis in sweep.axes:
            if name in axis.names:
                raise UserError(f"the sweep varies --{name}: set --axis={axis.name}=A,B")
        if name in parameters:
            parameters[name] = value
        elif name.startswith("then."):
            then[name.removeprefix("then.")] = value
        else:
            base[name] = value
    for name in given:
        if (other := alternative(name)) not in given:
            base.pop(other, None)
    set_by_axes = {name for axis in sweep.axes for name in axis.names}
    for name, value in parameters.items():
        if not value and name not in given.keys() | set_by_axes:
            raise UserError(f"{sweep.name} needs --{name}")
    return dataclasses.replace(sweep, parameters=parameters, base=base, then=then)


def alternative(name: str) -> str:
    """Returns the field that a run may have in place of `name`; "" if there is none."""
    from trainer.config.batch_of_tokens import ALTERNATIVES

    pairs = {**ALTERNATIVES, **{other: tokens for tokens, other in ALTERNATIVES.items()}}
    return pairs.get(name, "")


def checked(sweep: Sweep) -> Sweep:
    """Returns the sweep, or raises UserError if it has no cells or refers to unknown names."""
    if not sweep.seeds:
        raise UserError("the sweep has no cells: seeds is empty")
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise UserError("a seed occurs twice")
    names = [axis.name for axis in sweep.axes]
    for axis in sweep.axes:
        labels = [choice.label for choice in axis.choices]
        if not labels:
            raise UserError(f"the sweep has no cells: the axis {axis.name} has no values")
        if len(set(labels)) < len(labels):
            raise UserError(f"a value of the axis {axis.name} occurs twice")
        if all(map(is_number, labels)) and len(set(map(float, labels))) < len(labels):
            raise UserError(f"a value of the axis {axis.name} occurs twice, written differently")
        for other in sweep.axes:
            if other is not axis and (both := axis.names & other.names):
                raise UserError(f"the axes {axis.name} and {other.name} both set {min(both)}")
    if not any(True for _ in sweep.combinations()):
        raise UserError(f"the sweep has no cells: none of the values of {sweep.tune} is tried")
    for name, label in sweep.baseline.items():
        if name not in names:
            raise UserError(
                f"baseline: there is no axis {name}{nearest(name, names)}; the axes are "
                f"{', '.join(names) or 'none'}"
            )
        known = [choice.label for choice in sweep.axis(name).choices]
        if label not in known:
            raise UserError(
                f"baseline: the axis {name} has no value {label}{nearest(label, known)}; it has "
                f"{', '.join(known)}: choose one with --baseline"
            )
    if sweep.tune and sweep.tune not in names:
        raise UserError(f"tune: there is no axis {sweep.tune}; the axes are {', '.join(names)}")
    if (count := sweep.tune_seeds) is not None:
        if type(count) is not int or count < 1:
            raise UserError(f"tune_seeds={count}: give the number of seeds, 1 or more")
        if not sweep.tune:
            raise UserError(f"tune_seeds={count}: there is no axis to tune; name it with tune")
    if sweep.tune in sweep.baseline:
        raise UserError(f"tune: {sweep.tune} is part of the baseline: remove it from one of them")
    return sweep


def placeholders(text: str) -> set[str]:
    """Returns the names in braces; raises UserError for a malformed brace."""
    try:
        fields = [field[1:] for field in string.Formatter().parse(text) if field[1] is not None]
    except ValueError as error:
        raise UserError(f"{text}: {error}; write a literal brace twice") from error
    for name, form, conversion in fields:
        if form or conversion or not str(name).isidentifier():
            raise UserError(f"{text}: braces may contain only a parameter name")
    return {str(name) for name, _, _ in fields}


def filled(text: str, values: Settings) -> str:
    """Replaces the {placeholders} of a text; raises UserError for an unknown parameter."""
    for name in sorted(placeholders(text)):
        if name not in values:
            known = ", ".join(sorted(values))
            raise UserError(
                f"{text}: there is no parameter {name}{nearest(name, values)}: {known}; write a "
                "literal brace twice"
            )
    return text.format_map(values)
