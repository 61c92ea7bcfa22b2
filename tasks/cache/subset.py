"""Takes the first part of a cache's training split, which every epoch of a run then reads.

    0.01                             a share of the windows
    2^29 tokens                      the first tokens, as in the T5 paper's subsets
    1000 documents                   the first documents, or pairs
    TASK: AMOUNT; TASK: AMOUNT       an amount for each named task of a mixture

Windows are taken whole: those that end within the amount.

Source: Raffel et al. 2020, section 3.4.2.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tasks.cache.lineage import Lineage
from tasks.cache.manifest import CacheManifest, Plan, Shard
from tasks.cache.windows import Windows
from tasks.terminal.command_line import UserError

SHARE, TOKENS, DOCUMENTS = "", "tokens", "documents"
_FORM = re.compile(r"([0-9._]+(?:e[0-9]+)?)(?:\^([0-9]+))?\s*(|tokens|documents)")
_EXAMPLES = "a share such as 0.01, or '2^29 tokens', or '1000 documents'"


class Take(NamedTuple):
    """An amount; `unit` is SHARE, TOKENS or DOCUMENTS."""

    amount: float
    unit: str

    def __str__(self) -> str:
        return f"{self.amount:,.0f} {self.unit}" if self.unit else f"{self.amount:g}"


def parse(text: str) -> dict[str, Take]:
    """Parses task -> amount to take ("" means every task); raises ValueError if malformed."""
    found: dict[str, Take] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, amount = (piece.strip() for piece in part.rpartition(":"))
        if colon and not name:
            raise ValueError(f"{part} names no task before the colon")
        if name in found:
            raise ValueError(f"{name or 'an amount for all tasks'} is given twice")
        found[name] = _amount(amount)
    if not found or ("" in found and len(found) > 1):
        raise ValueError(f"write {_EXAMPLES}, or TASK: AMOUNT; TASK: AMOUNT")
    return found


def _amount(text: str) -> Take:
    form = _FORM.fullmatch(text)
    try:
        value = float(form[1]) ** int(form[2] or 1) if form else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    unit = form[3] if form else SHARE
    if not 0 < value < math.inf or (unit and not value.is_integer()):
        raise ValueError(f"{text} is not an amount: write {_EXAMPLES}")
    if unit == SHARE and value > 1:
        raise ValueError(f"{text} is more than the whole, 1: for a number, write '{text} tokens'")
    return Take(value, unit)


def of_task(amounts: Mapping[str, Take], task: str) -> Take | None:
    """Returns the amount to take from a task; None for all of it."""
    return amounts.get(task) or amounts.get("")


def held(plan: Plan, shards: Iterable[Shard], unit: str) -> int:
    """Returns the number of tokens or documents in `shards`."""
    counted = "rows" if unit == DOCUMENTS and plan.pairs and plan.adopted else unit
    return sum(getattr(shard, counted) for shard in shards)


def count(windows: Windows, folder: str, manifest: CacheManifest, split: str, wanted: Take) -> int:
    """Returns the number of windows that `wanted` takes.

    Raises UserError if the split is smaller, the amount is less than a window, or the cache does
    not support documents.
    """
    plan = manifest.plan
    if wanted.unit == DOCUMENTS and not plan.pairs and (plan.adopted or plan.rows_are_windows):
        why = "are not stored in sequence, unlike with packing concat"
        if plan.adopted:
            why = "are not known, because it was adopted"
        raise UserError(
            f"--data.take={wanted}: the documents of {folder} {why}; give tokens or a share"
        )
    most = held(plan, manifest.splits[split], wanted.unit) if wanted.unit else 1
    if wanted.amount > most:
        raise UserError(
            f"--data.take={wanted}: {folder} has {most:,} {wanted.unit} in {split}, not this many: "
            "take fewer, or leave it out"
        )
    if wanted.unit == SHARE:
        found = math.floor(round(wanted.amount * len(windows), 6))
    elif wanted.unit == TOKENS:
        found = windows.within_tokens(int(wanted.amount))
    elif plan.pairs:
        found = int(wanted.amount)
    else:
        before = Lineage(folder, manifest, split).tokens_before(int(wanted.amount))
        found = windows.within_tokens(before)
    if not found:
        raise UserError(
            f"--data.take={wanted} of {folder} is less than one window, which has "
            f"{windows.window_tokens:,} tokens: take more"
        )
    return found
