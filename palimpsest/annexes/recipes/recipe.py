"""A recipe: a TOML file whose tables are stages, and whose keys are the flags of their commands.

What one stage decides flows to the others, unless a key says otherwise: its folder, task, lengths
and corpora. A value may name another stage's output as {pretrain} or {finetune.NAME}.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palimpsest.annexes.recipes import derived_flags, shipped
from palimpsest.annexes.recipes.derived_flags import KINDS
from palimpsest.commands import COMMANDS, command
from tasks.storage import files
from tasks.terminal import toml_flags
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.flags import flags_of, made, parse, refuse_unknown
from trainer.checkpoints import metadata

_HEAD = "recipe"
_CORPUS = "corpus"
_TABLES = (_HEAD, _CORPUS, *KINDS)
# Stands for the folder of a recipe in records and lock files.
ANY_FOLDER = derived_flags.FOLDER
# The suffix of a lock file.
LOCK = ".lock"
_DEVICES = pathlib.Path("/dev")
Tables = Mapping[str, dict[str, Any]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a recipe.

    Attributes:
      name: name of its table, such as "cache.docs".
      command: its command's name, such as "vocab train".
      flags: flag -> its texts, several for a flag that is given several times.
      output: file or folder that the stage makes.
      needs: names of the stages whose outputs it reads.
    """

    name: str
    command: str
    flags: Mapping[str, tuple[str, ...]]
    output: str
    needs: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def words(self) -> list[str]:
        """The flags as typed."""
        return [f"--{flag}={text}" for flag, texts in self.flags.items() for text in texts]

    @property
    def line(self) -> list[str]:
        """The words of the command's line after "palimpsest"."""
        return [*self.command.split(), *self.words]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The stages of a recipe in the order in which they run; `folder` holds what they make.

    `text` is what was read from `path`. `portable` are the same stages with ANY_FOLDER in the place
    of the folder. `head` has the recipe's title and source.
    """

    path: pathlib.Path
    text: str
    folder: str
    stages: tuple[Stage, ...]
    portable: Mapping[str, Stage]
    head: Mapping[str, str]

    def stage(self, name: str, flag: str) -> Stage:
        """Returns the stage of this name; raises UserError if there is none."""
        names = [each.name for each in self.stages]
        if name not in names:
            raise UserError(
                f"--{flag}={name}: {self.path} has no such stage{nearest(name, names)}; it has "
                f"{', '.join(names)}"
            )
        return self.stages[names.index(name)]

    def after(self, changed: Sequence[Stage]) -> list[Stage]:
        """Returns `changed` and all stages that read their outputs, directly or not, in order."""
        names = {each.name for each in changed}
        for stage in self.stages:  # a stage comes after those that it needs
            if names & {*stage.needs}:
                names.add(stage.name)
        return [each for each in self.stages if each.name in names]


def read(path: str, folder: str | None = None) -> Recipe:
    """Reads a recipe; raises UserError if a table or key is unknown or a value is wrong.

    `path` may be the name of a recipe of `shipped`; `folder` replaces the recipe's own.
    """
    if own := shipped.find(path):
        # Its path has no folder, so that its lock file is written to the current one.
        file, text = pathlib.Path(path), toml_flags.text_of(own)
    else:
        file = pathlib.Path(path)
        text = _text(file)
    head, tables = tables_of(file, text)
    place = folder or head.get("folder") or file.stem
    if not own and not files.is_remote(place) and os.path.exists(place) and file.samefile(place):
        raise UserError(
            f"{path}: the folder for its results would have the recipe's own name: choose another "
            "--folder, or a name that ends in .toml"
        )
    return of_tables(file, tables, place, head, text)


def _text(file: pathlib.Path) -> str:
    if file.exists() and (
        not (file.is_file() or file.is_dir()) or file.absolute().parent == _DEVICES
    ):
        raise UserError(f"{file} is not a regular file: write the recipe to a file")
    if file.suffix == LOCK:
        raise UserError(
            f"{file}: {LOCK} is the suffix of its lock file: rename it to {file.stem}.toml"
        )
    return toml_flags.text_of(file)


def tables_of(path: pathlib.Path, text: str) -> tuple[Mapping[str, str], Tables]:
    """Returns the head of a recipe, and the keys and values of each corpus and stage by name."""
    whole = toml_flags.read(path, text)
    with _in(path):
        for name, table in whole.items():
            if name not in _TABLES:
                raise UserError(
                    f"unknown table [{name}]{nearest(name, _TABLES)}; known: {', '.join(_TABLES)}"
                )
            if not isinstance(table, dict):
                named = f" or [{name}.NAME]" * (name != _HEAD)
                raise UserError(f"{name} must be a table, [{name}]{named}")
        tables = {
            f"{kind}.{name}" if name else kind: table
            for kind in (_CORPUS, *KINDS)
            if kind in whole
            for name, table in _named(kind, whole[kind])
        }
        return _head(whole.get(_HEAD, {})), tables


def of_tables(
    path: pathlib.Path,
    tables: Tables,
    folder: str,
    head: Mapping[str, str] | None = None,
    text: str = "",
) -> Recipe:
    """Returns the recipe with these tables; raises UserError as `read` does."""
    corpora = {
        name.partition(".")[2]: table
        for name, table in tables.items()
        if name.startswith(f"{_CORPUS}.")
    }
    given = {name: table for name, table in tables.items() if not name.startswith(f"{_CORPUS}.")}
    with _in(path):
        if not given:
            raise UserError(f"there is no stage; give one of {', '.join(KINDS)}")
        place = folder.rstrip("/")
        if not place:
            raise UserError(f"--folder={folder}: name a folder of its own")
        stages, portable = (
            [_stage(name, given[name], flowing) for name in derived_flags.order(given)]
            for flowing in (
                derived_flags.Flowing(each, corpora, given) for each in (place, ANY_FOLDER)
            )
        )
        outputs: dict[str, str] = {}
        for stage in stages:
            other = outputs.setdefault(stage.output, stage.name)
            if other != stage.name:
                raise UserError(f"[{other}] and [{stage.name}] both write {stage.output}")
        ordered = tuple(_in_order(stages))
        return Recipe(
            path, text, place, ordered, {each.name: each for each in portable}, head or {}
        )


def _in_order(stages: list[Stage]) -> Iterator[Stage]:
    """Yields stages after those that they need, else in the given order."""
    left, done = list(stages), set[str]()
    while left:
        ready = next((each for each in left if done >= {*each.needs}), None)
        if ready is None:
            raise UserError(f"{' and '.join(each.name for each in left)} need each other")
        left.remove(ready)
        done.add(ready.name)
        yield ready


@contextlib.contextmanager
def _in(place: object) -> Iterator[None]:
    """Names a place in the errors of a block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _head(table: Mapping[str, Any]) -> Mapping[str, Any]:
    known = ("folder", "title", "source")
    for key, value in table.items():
        if key not in known:
            raise UserError(
                f"[{_HEAD}]: unknown key {key}{nearest(key, known)}; known: {', '.join(known)}"
            )
        if not isinstance(value, str):
            raise UserError(f"[{_HEAD}] {key} = {value}: it must be a text")
    return table


def _named(kind: str, table: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the flat tables in the table of a kind by name; "" has its own keys."""
    always = kind in (_CORPUS, *derived_flags.NAMED)
    groups = set() if always else {flag.group for flag in _flags(KINDS[kind].command)}
    inner = {
        name: value
        for name, value in table.items()
        if isinstance(value, dict) and name not in groups
    }
    own = {name: value for name, value in table.items() if name not in inner}
    for name, value in own.items():
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            raise UserError(f"[[{kind}.{name}]] is a list of tables: write [{kind}.{name}]")
    if always and own:
        raise UserError(f"[{kind}] has the key {next(iter(own))}: write [{kind}.NAME]")
    if inner and not always and kind not in derived_flags.MAY_BE_NAMED:
        raise UserError(f"[{kind}.{next(iter(inner))}]: [{kind}] has no such table")
    if own or (not inner and not always):
        yield "", toml_flags.flat(own)
    for name, value in inner.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"[{kind}.{name}]: a name has letters, digits, _ and - only")
        yield name, toml_flags.flat(value)


def _flags(name: str) -> tuple[Any, ...]:
    return flags_of(command(COMMANDS[name]).flags)


def _stage(name: str, table: Mapping[str, Any], flowing: derived_flags.Flowing) -> Stage:
    with _in(f"[{name}]"):
        return _checked(name, table, flowing)


def _checked(name: str, table: Mapping[str, Any], flowing: derived_flags.Flowing) -> Stage:
    own = dict(table)
    kind = KINDS[name.partition(".")[0]]
    words = own.pop(derived_flags.COMMAND, kind.command)
    if not isinstance(words, str) or words not in kind.commands:
        raise UserError(
            f"{derived_flags.COMMAND}={words}: it must be one of {', '.join(kind.commands)}"
        )
    if derived_flags.CORPORA in own and name.partition(".")[0] not in derived_flags.READ_CORPORA:
        raise UserError(
            f"{derived_flags.CORPORA} is a key of {', '.join(derived_flags.READ_CORPORA)} only"
        )
    if wrong := own.keys() & {*derived_flags.PARTIAL}:
        raise UserError(f"{min(wrong)} makes no whole {name}: run palimpsest {words} by itself")
    kind_of_flags = command(COMMANDS[words]).flags
    known = {each: flag for flag in _flags(words) for each in flag.names}
    given = {key: value for key, value in own.items() if key not in derived_flags.OF_RECIPE}
    typed = toml_flags.texts(kind_of_flags, given)
    needs: list[str] = []
    flags = flowing.flags(name, typed, needs)
    output = flowing.made_by(name, flags)
    if name.partition(".")[0] in derived_flags.RUNS:
        metadata.check_folder(output, "--model_dir")
    stage = Stage(name, words, flags, output, tuple(dict.fromkeys(needs)))
    made(kind_of_flags, parsed := parse(kind_of_flags, stage.words))  # refuses wrong values
    # Further flags are the runner's; there are none without one.
    rest = [flag.path for flag in known.values() if flag.field.metadata["rest"]]
    if rest and "runner" not in flags:
        refuse_unknown(parsed.values[rest[0]], known)
    return stage
