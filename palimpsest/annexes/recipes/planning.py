"""Plans a recipe before anything is spent: the size, time and price of every stage."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence

from palimpsest.annexes.recipes import stage_state
from palimpsest.annexes.recipes.derived_flags import RUNS
from palimpsest.annexes.recipes.recipe import Recipe, Stage
from palimpsest.annexes.recipes.running import told
from tasks.reading import languages, sources
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table

# Flags of a build that depend on stages that have not run, and what replaces them.
_OF_OTHERS = ("exclude", "extra_ids")
_SENTINELS = {"extra_ids": ("100",)}
# What every message about a Hub or a store says that does not answer: the rest is planned.
_UNREACHABLE = "cannot be reached"
_START, _GIN = "init_from", ("gin_file", "gin_search_paths", "gin_param")
# A run that has none of these takes the model of what it starts from.
_MODELS = {"preset", "gin_file", _START}


@dataclasses.dataclass(frozen=True)
class Planned:
    """The size, time and price of a stage, as far as they are known."""

    documents: float | None = None
    tokens: float | None = None
    size: float | None = None  # bytes of text that it reads
    hours: float | None = None
    dollars: float | None = None
    note: str = ""


def plan(recipe: Recipe, topology: str | None) -> int:
    """Prints a table of all stages.

    Raises UserError after it if a run does not fit the slice, or cannot be planned for it.
    """
    states = stage_state.states(recipe)
    found: dict[str, Planned] = {}
    refused: UserError | None = None
    for stage in recipe.stages:
        print(f"planning {stage.name}", file=sys.stderr, flush=True)
        try:
            found[stage.name] = _planned(recipe, stage, states, topology)
        except UserError as error:
            if stage.kind not in RUNS:
                raise
            found[stage.name], refused = Planned(note="not planned: see below"), refused or error
    header = ("stage", "state", "documents", "M tokens", "MB", "hours", "dollars", "")
    rows = [
        (
            *(name, states[name].word, _number(each.documents, 1, 0)),
            *(_number(each.tokens, 1e6, 1), _number(each.size, 1e6, 1)),
            *(_number(each.hours, 1, 2), _number(each.dollars, 1, 2), each.note),
        )
        for name, each in found.items()
    ]
    hours = sum(each.hours or 0 for each in found.values())
    dollars = sum(each.dollars or 0 for each in found.values())
    rows.append(("all", "", "", "", "", _number(hours, 1, 2), _number(dollars, 1, 2), ""))
    print(table(header, rows))
    if refused:
        raise refused
    return 0


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _planned(
    recipe: Recipe, stage: Stage, states: Mapping[str, stage_state.State], topology: str | None
) -> Planned:
    if stage.kind in ("dedup", "vocabulary"):
        return _of_corpora(stage)
    if stage.kind == "cache":
        made = states[stage.name].made
        if made is not None:
            counts = (
                sum(each[name] for each in made.values())
                for name in ("documents", "tokens", "text_bytes")
            )
            return Planned(*counts)
        return _of_build(stage, [name for name in stage.needs if states[name].made is None])
    if stage.kind in RUNS:
        if states[stage.name].word == stage_state.FINISHED:
            return Planned()
        if topology is None:
            return Planned(note="with --topology=v5e:4x4, h100:8 and so on")
        return of_run(recipe, stage, topology)
    return Planned()


def _of_corpora(stage: Stage) -> Planned:
    """Returns the size of the corpora that a stage reads."""
    names = stage.flags.get("languages", (None,))[0]
    try:
        corpora = languages.specs(stage.flags.get("corpus", ()), names, unnamed=True).values()
        size = sum(piece.bytes for each in corpora for piece in sources.resolve(each).pieces)
    except UserError as error:  # such as a Hub that cannot be reached: the rest is planned
        return Planned(note=_not_read(error))
    return Planned(size=size)


def _of_build(stage: Stage, missing: Sequence[str]) -> Planned:
    """Returns the estimate of a build; of the stages that it needs, some may be `missing`."""
    flags = {name: texts for name, texts in stage.flags.items() if name not in _OF_OTHERS}
    blind = dataclasses.replace(stage, flags={**flags, "vocabulary": ("bytes",), **_SENTINELS})
    try:
        words = (blind if missing else stage).line
        lines = told(stage, [*words, "--dry_run", "--json"]).splitlines()
    except UserError as error:
        if not missing and _UNREACHABLE not in str(error):
            raise
        return Planned(note=_not_read(error).replace(f"[{stage.name}] ", ""))
    found = [json.loads(line) for line in lines if line.startswith("{")]
    counts = [of_split for each in found for of_split in each["counts"].values()]
    documents = sum(count["documents"] for count in counts)
    size = sum(each["bytes"] for each in found)
    if missing:
        return Planned(documents, size=size, note=f"the rest needs {' and '.join(missing)}")
    seconds = [each["seconds"] for each in found if each["seconds"] is not None]
    dollars = [each["dollars"] for each in found if each["dollars"] is not None]
    return Planned(
        documents,
        sum(count["tokens"] for count in counts),
        size,
        sum(seconds) / 3600 if seconds else None,
        sum(dollars) if dollars else None,
    )


def _not_read(error: UserError) -> str:
    return f"not read: {str(error).partition('; ')[0]}"


def of_run(recipe: Recipe, stage: Stage, topology: str) -> Planned:
    """Returns a run's time and price on a slice; raises UserError if it does not fit."""
    if "length_schedule" in stage.flags:
        return Planned(note="its lengths change: plan each of them with palimpsest plan")
    words = [*words_of_run(recipe, stage), f"--topology={topology}", "--json"]
    found = json.loads(told(stage, ["plan", *words]))
    memory = found["needed_bytes"] / 1e9
    note = f"{found['devices']} x {found['device_kind']}, {memory:,.1f} GB each"
    if rate := found["tokens_per_second_per_device"]:
        positions = rate * found["devices"] * found["hours"] * 3600
        note += f", {positions / 1e9:,.1f} G positions"
    return Planned(hours=found["hours"], dollars=found["dollars"], note=note)


def words_of_run(recipe: Recipe, stage: Stage) -> list[str]:
    """Returns a run's flags without its caches, with the model of what it starts from."""
    flags = {
        name: texts
        for name, texts in stage.flags.items()
        if name != "cache_dir" and not name.startswith(_START)
    }
    given = [stage, *(each for each in recipe.stages if each.name in stage.needs)]
    for each in given:
        if not flags.keys() & _MODELS:
            found = {
                name: texts
                for name, texts in each.flags.items()
                if name in ("preset", *_GIN)
                or name.startswith("model.")
                or (name == _START and texts[0].startswith("hf:"))
            }
            flags = found | flags
    return [f"--{name}={text}" for name, texts in flags.items() for text in texts]
