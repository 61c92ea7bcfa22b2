"""A reader whose cache gets another plan is told so, whichever file it finds changed first."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest

from tasks.cache.filtered import ExcludeRecord
from tasks.cache.manifest import PLAN, PLAN_MARK, as_json
from tasks.cache.plan_check import PlanCheck, excludes_more
from tasks.terminal.command_line import UserError
from tests.support.window_caches import make

IDS = ExcludeRecord("a" * 64, "ids", 20, 0)
FILES = [{"name": name, "bytes": 1} for name in ("a.txt", "b.txt", "c.txt")]
# What a build changes -> what is said of it.
CHANGES = [
    (
        {"exclude": (IDS,)},
        r"\(a takedown: --exclude got more lists, with 20 entries, .*another --m",
    ),
    (
        {"corpus": {"spec": "text:*", "files": FILES, "generations": [1, 2]}},
        r"\(--extend added 2 file\(s\) of the corpus\): runs that began earlier cannot continue",
    ),
    ({"row_tokens": 70}, r"\(row_tokens: 70, there: 100\): build it with the flags that it was b"),
]


@pytest.fixture
def cache(tmp_path):
    made = make(tmp_path / "cache")
    corpus = {"spec": "text:*", "files": FILES[:1]}
    plan = dataclasses.replace(made.manifest.plan, corpus=corpus)
    made.manifest = dataclasses.replace(made.manifest, plan=plan)
    replan(made, plan)
    return made


def replan(cache, plan):
    """Gives the folder another plan, as a build does."""
    folder = pathlib.Path(cache.folder)
    for mark in folder.glob(f"{PLAN_MARK}*"):
        mark.unlink()
    (folder / f"{PLAN_MARK}{plan.fingerprint}").touch()
    (folder / PLAN).write_text(json.dumps(as_json(plan)))


def changed(cache, **changes):
    return dataclasses.replace(cache.manifest.plan, **changes)


@pytest.mark.parametrize(("changes", "says"), CHANGES)
@pytest.mark.parametrize("damage", ["records gone", "index gone", "records cut", "same size"])
def test_another_plan_is_named_in_place_of_a_file(cache, changes, says, damage):
    check = PlanCheck(cache.folder, cache.manifest.plan)
    assert check.marked
    assert not check.replaced
    assert check.error() is None
    windows = cache.windows(100)
    windows.read(np.array([0]))
    replan(cache, changed(cache, **changes))
    records = pathlib.Path(cache.path("tfrecord", 4))
    if damage.endswith("gone"):
        os.remove(cache.path("tfrecord" if "records" in damage else "rows", 4))
    else:
        data = bytearray(records.read_bytes())
        if damage == "records cut":
            del data[-10:]
        else:
            # Of the last rows, which are not read: what the shard holds is another plan's.
            data[-6] ^= 1
        records.write_bytes(data)
    # What was opened before and what is still the same are read.
    windows.read(np.array([0, 30]))
    with pytest.raises(UserError, match=f"now holds a cache with a different plan .*{says}"):
        windows.read(np.array([40]))
    assert check.replaced


def test_damage_under_the_same_plan_is_damage(cache):
    os.remove(cache.path("tfrecord", 4))
    with pytest.raises(UserError, match=r"is missing: run pipeline\.build again"):
        cache.windows(100).read(np.array([40]))
    plan = pathlib.Path(cache.folder, PLAN)
    # Nor is a damaged plan.json another plan.
    for mark in pathlib.Path(cache.folder).glob(f"{PLAN_MARK}*"):
        mark.rename(mark.with_name(PLAN_MARK + "0" * 64))
    for text in (plan.read_text().replace("100", "101"), "{", None):
        plan.unlink() if text is None else plan.write_text(text)
        assert PlanCheck(cache.folder, cache.manifest.plan).error() is None


def test_a_plan_with_more_lists_is_a_takedown_and_nothing_else(cache):
    plan, more = cache.manifest.plan, dataclasses.replace(IDS, sha256="b" * 64)
    one, two = changed(cache, exclude=(IDS,)), changed(cache, exclude=(IDS, more))
    assert excludes_more(plan, one)
    assert excludes_more(one, two)
    for before, now in (
        (plan, plan),
        (two, one),
        (changed(cache, exclude=(more,)), two),
        (plan, dataclasses.replace(one, row_tokens=70)),
    ):
        assert not excludes_more(before, now)
