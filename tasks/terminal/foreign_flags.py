"""Answers to flags of other trainers, which people type out of habit: foreign_flags.toml.

Annexes add to it in the slots "foreign_flags" and, for commands that have a flag,
"foreign_answers.FLAG"; "advice.NAME" follows the answer whose first name is NAME.
"""

import difflib
import functools
import pathlib
import tomllib
from collections.abc import Collection
from typing import Any

from tasks import annexes

# Their groups of flags -> ours.
_GROUPS = {"optim": "optimizer", "opt": "optimizer", "eval": "evaluation", "logging": "metrics"}
# Their groups whose flags may have any place here.
_ANYWHERE = ("", "optim", "optimizer", "model", "data", "training")
_CLOSE = 0.79  # a lower similarity proposes flags that mean something else
_SHOWN = 4  # flags named for a group


def hint(word: str, known: Collection[str]) -> str:
    """Returns advice in brackets for an unknown flag, typed as "--name" or "name", or "".

    `known` holds the names of the command's flags.
    """
    name = word.removeprefix("--").replace("-", "_")
    if name.removeprefix("no_") in known and name.startswith("no_"):
        return f" (did you mean --{name[3:]}=false?)"
    found = _instead(name, known)
    if not found and (answer := _answer(name, known)):
        return f" ({answer})"
    if not found and (group := [each for each in known if each.startswith(f"{name}.")]):
        more = ", …" * (len(group) > _SHOWN)
        return f" (it is a group: {', '.join(f'--{each}' for each in group[:_SHOWN])}{more})"
    found = found or _similar(name, known)
    return f" (did you mean {' or '.join(f'--{each}' for each in found)}?)" if found else ""


@functools.cache
def table() -> dict[str, Any]:
    """Returns "instead", our flags -> theirs, and "answers", flag -> answer -> their flags."""
    return tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _instead(name: str, known: Collection[str]) -> list[str]:
    """Returns the flags that do what another trainer's flag of this name does, or have its name."""
    group, _, last = name.rpartition(".")
    if (ours := f"{_GROUPS.get(group)}.{last}") in known:
        return [ours]
    rows = [*table()["instead"].items(), *annexes.entries("foreign_flags").items()]
    for theirs in dict.fromkeys((name, last) if group in _ANYWHERE else (name,)):
        groups = "|".join(ours for ours, names in rows if theirs in names.split())
        for flags in groups.split("|"):
            if here := [flag for flag in flags.split() if flag in known]:
                return here
    return [each for each in sorted(known) if each.rpartition(".")[2] == name]


def _answer(name: str, known: Collection[str]) -> str:
    for flag in ("any", *known):
        of_core = table()["answers"].get(flag, {})
        for answer, names in {**of_core, **annexes.entries(f"foreign_answers.{flag}")}.items():
            if name in names.split():
                return answer + annexes.advice(names.split()[0])
    return ""


def _similar(name: str, known: Collection[str]) -> list[str]:
    """Returns the flag that may have been misspelled, if its group is as similar as its name."""

    def similarity(flag: str) -> float:
        pairs = zip(flag.rpartition("."), name.rpartition("."), strict=True)
        return min(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    ends = {each.rpartition(".")[2]: each for each in sorted(known)} if "." not in name else {}
    best = max([*known, *ends], key=similarity, default="")
    return [best if best in known else ends.get(best, best)] if similarity(best) > _CLOSE else []
