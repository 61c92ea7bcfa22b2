"""Checks that a cache still has the plan with which a reader began.

A takedown or an extension may change the plan during a read. The old plan's mark is removed before
anything of the new plan is written, so a file opened while the mark existed belongs to the old
plan.
"""

import dataclasses
import functools

from tasks.cache.manifest import PLAN, PLAN_MARK, Plan, plan_from_dict
from tasks.storage import files
from tasks.terminal.command_line import UserError


def is_replaced(folder: str, fingerprint: str) -> bool:
    """Returns True if the folder has only the marks of other plans.

    Adopted caches have no marks.
    """
    return not files.exists(files.join(folder, PLAN_MARK + fingerprint)) and bool(
        files.list_sizes(folder, PLAN_MARK)
    )


def check_writable(folder: str, fingerprint: str) -> None:
    """Raises a UserError if the folder of a build has another plan than the build's by now."""
    if is_replaced(folder, fingerprint):
        raise UserError(
            f"{folder} got another plan while this build ran, which therefore writes nothing more: "
            "run pipeline.build again with the flags of the new plan"
        )


def guard(folder: str, fingerprint: str) -> files.Guard:
    """Returns what forbids changes of a build's folder once it has another plan."""
    return files.Guard(functools.partial(check_writable, folder, fingerprint))


class PlanCheck:
    """Compares a folder's current plan with the one that its reader began with."""

    def __init__(self, folder: str, plan: Plan):
        self._folder, self._plan = folder, plan
        self._settled: bool | None = None

    @property
    def fingerprint(self) -> str:
        return self._plan.fingerprint

    @property
    def marked(self) -> bool:
        return files.exists(files.join(self._folder, PLAN_MARK + self.fingerprint))

    @property
    def replaced(self) -> bool:
        """True if the folder has only the marks of other plans; no build brings a plan back."""
        if self._settled is None and not self.marked:
            # Listing may be slow, and its answer is final.
            self._settled = is_replaced(self._folder, self.fingerprint)
        return bool(self._settled)

    def error(self) -> UserError | None:
        """Returns the reader's error if its cache now has a different plan, else None."""
        if self.marked:
            return None
        try:
            now = plan_from_dict(files.read_json(files.join(self._folder, PLAN)))
        except (FileNotFoundError, UserError):
            return None
        if not files.exists(files.join(self._folder, PLAN_MARK + now.fingerprint)):
            return None  # plan.json is damaged
        return self.against(now)

    def against(self, now: Plan) -> UserError | None:
        """Returns the reader's error if the plan `now` is a different one, else None."""
        if now.fingerprint == self.fingerprint:
            return None
        what, advice = _change(self._plan, now)
        return UserError(
            f"{self._folder} now holds a cache with a different plan than when opened ({what}): "
            f"{advice}"
        )


def excludes_more(existing: Plan, ours: Plan) -> bool:
    """Returns whether our plan differs from the existing one only in having more exclude lists."""
    before, now = existing.exclude or (), ours.exclude or ()
    same = dataclasses.replace(existing, exclude=None).difference(
        dataclasses.replace(ours, exclude=None)
    )
    return not same and len(now) > len(before) and now[: len(before)] == before


def _change(before: Plan, now: Plan) -> tuple[str, str]:
    new_run = "runs that began earlier cannot continue with it: train another --model_dir"
    if excludes_more(before, now):
        added = (now.exclude or ())[len(before.exclude or ()) :]
        entries = sum(each.documents + each.paragraphs for each in added)
        what = f"a takedown: --exclude got more lists, with {entries:,} entries, and the shards"
        return f"{what} with such documents are rewritten", new_run
    old, new = before.generations, now.generations
    if len(new) > len(old) and new[: len(old)] == old:
        added_files = sum(map(len, new[len(old) :]))
        return f"--extend added {added_files:,} file(s) of the corpus", new_run
    return (
        "; ".join(now.difference(before)[:3]),
        "build it with the flags that it was begun with, or train another --model_dir",
    )
