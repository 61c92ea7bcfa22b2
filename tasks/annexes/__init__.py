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

A fault of ours is an error. A fault of another distribution's annex is a line on stderr, and its
annex, or the entry at fault, is left out: only what uses it fails, with `BrokenAnnex`.
"""

import dataclasses
import fnmatch
import functools
import importlib
import importlib.util
import pathlib
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

FILE = "annex.toml"
# The packages with a folder `annexes`.
_PACKAGES = ("tasks", "vocab", "pipeline", "trainer", "palimpsest")
_GROUP = "palimpsest.annexes"
# All slots that something reads; * stands for any name.
_SLOTS = """
    commands.* variants words words_help python flags.* run_flags model_flags
    foreign_flags foreign_answers.* advice.* shows_runs uses_runs.*
    formats file_endings listers archives adopted engines filters exclude_lists dry_runs
    tasks metrics vocabularies judges settings moved_settings data batches caches batch_features
    presets families parts.attention_pattern parts.attention_window parts.cross_attention
    parts.feed_forward parts.mixer parts.norm parts.norm_placement parts.parallel_blocks
    parts.parametrisation parts.position parts.stack_parts attention_cores
    attention_cores.patterned attention_cores.auto.* logit_kernels optimizers optimizer_presets
    source_optimizers losses tunings added_parameters training_engines checkpoints
    transformers_types folder_models folder_parameters folder_checks starting_vocabularies
    evaluations evaluate watched model gin_dialects
"""


class BrokenAnnex(Exception):
    """The fault of an annex of another distribution, and what to do."""

    def __init__(self, package: str, distribution: str, fault: str):
        super().__init__(
            f"the annex {package} of the distribution {distribution} {fault}; mend it, or remove "
            f"it with pip uninstall {distribution}"
        )


@dataclasses.dataclass(frozen=True)
class Annex:
    """An annex: its package, such as trainer.annexes.planning, and what its file says."""

    package: str
    folder: pathlib.Path
    title: str
    needs: tuple[str, ...]
    slots: Mapping[str, Mapping[str, str]]  # slot -> name -> reference
    distribution: str = ""  # "": ours

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]

    def modules(self) -> set[str]:
        """Returns the modules that its entries name, beside texts of advice."""
        named = (reference for entries in self.slots.values() for reference in entries.values())
        return {reference.partition(":")[0] for reference in named}

    def broken(self, fault: str) -> Exception:
        """Returns the error for a fault, such as "has no title"; ours are mistakes of this tree."""
        if self.distribution:
            return BrokenAnnex(self.package, self.distribution, fault)
        return ValueError(f"{self.package} {fault}")


# Packages of annexes that cannot be used, names by slot that the core has, and what was said.
_left_out: set[str] = set()
_reserved: dict[str, set[str]] = {}
_said: set[str] = set()


@functools.cache
def annexes() -> tuple[Annex, ...]:
    """Returns all annexes, ours first, sorted by package."""
    root = pathlib.Path(__file__).parents[2]
    found = [
        _annex(".".join(file.parent.relative_to(root).parts), file)
        for package in _PACKAGES
        for file in sorted(root.glob(f"{package}/annexes/*/{FILE}"))
    ]
    installed = [*_installed()]
    names = {annex.name for annex in (*found, *installed)}
    for annex in installed:
        if fault := _fault(annex, found, names):
            _say(annex.broken(f"is left out: {fault}"))
        else:
            found.append(annex)
    for annex in found:
        for slot in annex.slots if annex.distribution else ():
            if not any(fnmatch.fnmatchcase(slot, known) for known in _SLOTS.split()):
                _say(annex.broken(f"fills [{slot}], a slot that nothing reads"))
    return tuple(found)


def _installed() -> Iterator[Annex]:
    """Yields the annexes of other distributions whose files can be read."""
    for point in sorted(entry_points(group=_GROUP), key=lambda point: point.value):
        distribution = point.dist.name if point.dist else point.name
        try:
            annex = _annex(point.value, _file(point), distribution)
        except Exception as error:  # whatever the packages above it raise
            _say(BrokenAnnex(point.value, distribution, f"is left out: {_in_words(error)}"))
            continue
        if annex.package not in _left_out:
            yield annex


def _file(point: EntryPoint) -> pathlib.Path:
    spec = importlib.util.find_spec(point.value)  # imports the packages above it, if any
    folders = spec.submodule_search_locations or () if spec else ()
    files = [pathlib.Path(folder) / FILE for folder in folders]
    if found := next((file for file in files if file.is_file()), None):
        return found
    raise ValueError(f"there is no package {point.value} with a file {FILE}")


def _in_words(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _say(fault: Exception) -> None:
    """Prints a fault once, in the first process; raises it if the annex is ours."""
    if not isinstance(fault, BrokenAnnex):
        raise fault
    # Other programs' processes of work repeat it; ours have a parent.
    from multiprocessing import process  # slow to import

    if str(fault) not in _said and process.parent_process() is None:
        print("warning:", " ".join(str(fault).split()), file=sys.stderr)
    _said.add(str(fault))


def _fault(annex: Annex, others: Sequence[Annex], names: set[str]) -> str:
    """Returns why an annex cannot stand beside others, or ""."""
    if missing := {*annex.needs} - names:
        return f"it needs the annex {min(missing)}, which is not installed"
    taken = {
        (_space(slot), name): (reference, other)
        for other in others
        for slot, entries in other.slots.items()
        for name, reference in entries.items()
    }
    for slot, entries in annex.slots.items():
        for name, reference in entries.items():
            found, other = taken.get((_space(slot), name), (reference, annex))
            if found != reference:
                return f"the annex {other.package} has the name of [{slot}] {name}"
    return ""


def _space(slot: str) -> str:
    """Returns the slots, or the slot, in which a name is given once."""
    return "commands" if slot.startswith("commands.") else slot


def _annex(package: str, file: pathlib.Path, distribution: str = "") -> Annex:
    """Returns the annex that a file describes; raises ValueError if it has a fault."""
    value = tomllib.loads(file.read_text("utf-8"))
    title, needs = value.pop("title", None), value.pop("needs", [])
    if not isinstance(title, str):
        raise ValueError(f"{FILE} needs a text called title")
    if not (isinstance(needs, list) and all(isinstance(name, str) for name in needs)):
        raise ValueError(f"needs in {FILE} must be a list of names")
    slots = dict(_slots("", value, package))
    return Annex(package, file.parent, title, tuple(needs), slots, distribution)


def _slots(
    path: str, table: Mapping[str, Any], package: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (slot, name -> reference): slots may be nested, such as commands.training."""
    own = {}
    for name, value in table.items():
        if isinstance(value, str):
            own[name] = package + value if value.startswith(".") else value
        elif isinstance(value, dict):
            yield from _slots(f"{path}.{name}" if path else name, value, package)
        else:
            place = f"{path}.{name}" if path else name
            raise ValueError(f"{place} in {FILE} must be a text or a table, not {value!r}")
    if own:
        yield path, own


@functools.cache
def slots() -> tuple[str, ...]:
    """Returns the names of all slots that annexes fill, sorted."""
    return tuple(sorted({slot for annex in annexes() for slot in annex.slots}))


@functools.cache
def entries(slot: str) -> Mapping[str, str]:
    """Returns name -> reference of a slot, from all annexes, without names that the core has."""
    found: dict[str, str] = {}
    for annex in annexes():
        own = annex.slots.get(slot, {})
        for name in _reserved.get(_space(slot), set()) & {*own}:
            _say(annex.broken(f"is left out of [{slot}] {name}: the core has that name"))
        found |= {name: own[name] for name in own if name not in _reserved.get(_space(slot), ())}
    return found


def reserve(slot: str, names: Iterable[str]) -> None:
    """Leaves names of a slot to the core; "commands" stands for the slots of all its groups."""
    known, added = _reserved.setdefault(slot, set()), {*names}
    if not added <= known:
        known |= added
        entries.cache_clear()


def load(reference: str) -> Any:
    """Imports and returns what a reference "module" or "module:attribute" names.

    Raises BrokenAnnex if that fails in an annex of another distribution.
    """
    module, _, attribute = reference.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except Exception as error:
        owner = next((annex for annex in annexes() if module in annex.modules()), None)
        if owner is None or not owner.distribution or isinstance(error, BrokenAnnex):
            raise
        raise owner.broken(f"fails in {reference}: {_in_words(error)}") from error


def get(slot: str, name: str) -> Any:
    """Imports and returns the entry of a slot; None if no annex has it."""
    reference = entries(slot).get(name)
    return None if reference is None else load(reference)


def loaded(slot: str, *, whole: bool = False) -> dict[str, Any]:
    """Imports and returns all entries of a slot by name; leaves out broken ones of strangers.

    With `whole`, these annexes are left out of all slots.
    """
    found, broken = {}, {}
    for name, reference in entries(slot).items():
        try:
            found[name] = load(reference)
        except BrokenAnnex as fault:
            _say(fault)
            broken[name] = reference
    if whole and broken:
        at_fault = [
            annex for annex in annexes() if annex.slots.get(slot, {}).items() & broken.items()
        ]
        _left_out.update(annex.package for annex in at_fault)
        for cached in (annexes, slots, entries):
            cached.cache_clear()
    return found


def every(slot: str) -> list[Any]:
    """Imports and returns all entries of a slot; leaves out broken ones of strangers."""
    return [*loaded(slot).values()]


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
        reserve(slot, own)
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
