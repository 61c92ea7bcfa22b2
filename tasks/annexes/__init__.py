"""Annexes: folders that extend the core and can be deleted.

An annex is a folder PACKAGE/annexes/NAME of ours, or a package of another distribution that has an
entry point in the group "palimpsest.annexes". Its file annex.toml says what it adds to which slot:

    title = "Plans of runs: memory, time and price before anything runs"

    [commands.training]
    plan = ".plan"

An annex that builds on others of ours, and goes with them, has `needs = ["NAME"]` below its title.
A slot is a table of names. A value is a module or "module:attribute"; a leading dot stands for the
annex's own package. Nothing of an annex is imported until a name of it is used. The core reads its
slots here and names no annex.
"""

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

FILE = "annex.toml"
# The packages with a folder `annexes`.
_PACKAGES = ("tasks", "vocab", "pipeline", "trainer", "palimpsest")
_GROUP = "palimpsest.annexes"


@dataclasses.dataclass(frozen=True)
class Annex:
    """An annex: its package, such as trainer.annexes.planning, and what its file says."""

    package: str
    folder: pathlib.Path
    title: str
    needs: tuple[str, ...]
    slots: Mapping[str, Mapping[str, str]]  # slot -> name -> reference

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]


@functools.cache
def annexes() -> tuple[Annex, ...]:
    """Returns all annexes, ours first, sorted by package."""
    root = pathlib.Path(__file__).parents[2]
    ours = [
        _annex(".".join(file.parent.relative_to(root).parts), file)
        for package in _PACKAGES
        for file in sorted(root.glob(f"{package}/annexes/*/{FILE}"))
    ]
    return (*ours, *_installed())


def _installed() -> Iterator[Annex]:
    for point in sorted(entry_points(group=_GROUP), key=lambda each: each.value):
        spec = importlib.util.find_spec(point.value)  # imports the packages above it, if any
        for folder in spec.submodule_search_locations or () if spec else ():
            yield _annex(point.value, pathlib.Path(folder) / FILE)


def _annex(package: str, file: pathlib.Path) -> Annex:
    value = tomllib.loads(file.read_text("utf-8"))
    title, needs = value.pop("title"), tuple(value.pop("needs", ()))
    return Annex(package, file.parent, title, needs, dict(_slots("", value, package)))


def _slots(
    path: str, table: Mapping[str, Any], package: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (slot, name -> reference): slots may be nested, such as commands.training."""
    own = {}
    for name, value in table.items():
        if isinstance(value, str):
            own[name] = package + value if value.startswith(".") else value
        else:
            yield from _slots(f"{path}.{name}" if path else name, value, package)
    if own:
        yield path, own


@functools.cache
def slots() -> tuple[str, ...]:
    """Returns the names of all slots that annexes fill, sorted."""
    return tuple(sorted({slot for annex in annexes() for slot in annex.slots}))


@functools.cache
def entries(slot: str) -> Mapping[str, str]:
    """Returns name -> reference of a slot, from all annexes; names are taken once."""
    found: dict[str, str] = {}
    for annex in annexes():
        for name, reference in annex.slots.get(slot, {}).items():
            if found.setdefault(name, reference) != reference:
                raise ValueError(f"{slot} {name}: both {found[name]} and {reference}")
    return found


def load(reference: str) -> Any:
    """Imports and returns what a reference "module" or "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def get(slot: str, name: str) -> Any:
    """Imports and returns the entry of a slot; None if no annex has it."""
    reference = entries(slot).get(name)
    return None if reference is None else load(reference)


def every(slot: str) -> list[Any]:
    """Imports and returns all entries of a slot."""
    return [load(reference) for reference in entries(slot).values()]


def advice(subject: str) -> str:
    """Returns what annexes can do about a problem, as text that follows a sentence, or ""."""
    return "".join(f"; {text}" for text in entries(f"advice.{subject}").values())


_Value = TypeVar("_Value")


class Registry(Mapping[str, _Value]):
    """Values by name: the core's and those that modules register, `own`, and a slot's of annexes.

    A value of an annex is imported when it is read; the names alone import nothing.
    """

    def __init__(self, slot: str, own: Mapping[str, _Value]):
        self._slot, self.own = slot, dict(own)
        self._read: dict[str, _Value] = {}

    def __getitem__(self, name: str) -> _Value:
        if name in self.own:
            return self.own[name]
        if name not in self._read:
            self._read[name] = self.completed(load(entries(self._slot)[name]))
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in entries(self._slot)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **entries(self._slot)})

    def __len__(self) -> int:
        return len({**self.own, **entries(self._slot)})

    def completed(self, value: _Value) -> _Value:
        """Returns what is kept of a value that is added."""
        return value

    def register(self, name: str, value: _Value) -> None:
        """Adds a value for this process; raises ValueError if the name is taken."""
        if name in self:
            raise ValueError(f"there is already a {self._slot.rpartition('.')[2]} called {name!r}")
        self.own[name] = self.completed(value)
