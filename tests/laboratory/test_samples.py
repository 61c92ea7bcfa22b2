"""A small sample of each laboratory; differences and planted faults are noticed."""

import argparse
import collections
import dataclasses
import lzma
import re

import pytest

from pipeline.building import documents
from tasks.reading import compression
from tasks.vocabularies import neighbours, pieces
from tests.laboratory import __main__ as laboratory
from tests.laboratory import builds, faults, oracle, runs
from tests.laboratory.commands import Difference
from tests.laboratory.sample import sample

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("what", "count", "more"),
    [("builds", 6, ()), ("runs", 1, ()), ("tokenizers", 8, ("--texts=5000",))],
)
def test_a_small_sample_is_equal(what, count, more, tmp_path):
    code, _, output = sample(tmp_path, what, f"--count={count}", *more)
    assert code == 0, output
    assert f"{count} random {what}, 0 differences, seed 5, " in output


@pytest.mark.slow
def test_a_large_build_survives_every_fault(tmp_path):
    words = ("--large", "--count=1", "--kills=4", "--workers=1", "--corpus_bytes=400000")
    code, counts, output = sample(tmp_path, "builds", *words)
    assert code == 0, output
    assert sum(times for what, times in counts.items() if what.startswith("built, ")) == 4
    assert counts["finished shards redone"] == 0
    named = [what.split(" (")[0].split(":")[0] for what in counts]
    assert {*faults.EVERY} - {*named} <= {"search for duplicates killed"}


@pytest.mark.slow
def test_kills_of_a_given_run_leave_no_trace(text_cache, tmp_path):
    words = (f"--cache_dir={text_cache.parent}", "--kills=10", "--damages=3")
    code, counts, output = sample(tmp_path, "runs", *words)
    assert code == 0, output
    assert counts["kills"] >= 10
    assert len([what for what in counts if " while " in what]) > 2
    assert counts["second run refused"] == counts["edited task refused"] == 1


def test_a_command_that_fails_is_reported(text_cache, tmp_path):
    words = ("--batch_sise=4", f"--cache_dir={text_cache.parent}")
    code, _, output = sample(tmp_path, "runs", *words)
    assert code == 1
    assert re.search("a run ended with 2: .*batch_sise", output), output


def given(*words, **values):
    """Returns flags of the laboratory, with values of their own."""
    flags = laboratory.command_line().parse_args(words)
    return argparse.Namespace(**vars(flags) | values)


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """Returns a built trial, of texts in concat packing."""
    folder = tmp_path_factory.mktemp("trial")
    builds.warm(given("builds", count=0), folder / "shared")
    for number in range(99):
        made = builds.Trial(given("builds", seed=1), number, folder, "t5")
        if made.describe().split()[3:] == ["concat", "none"]:
            made.warm()
            if len(made.wanted().popitem()[1]["train"].kept) > 5:
                return made
    raise AssertionError("no such trial is drawn")


def lost(held):
    return held._replace(kept=held.kept[:-1])


def renamed(held):
    return held._replace(kept=[held.kept[0]._replace(id="another"), *held.kept[1:]])


def other_token(held):
    (tokens,) = held.kept[0].tokens
    return held._replace(kept=[held.kept[0]._replace(tokens=((*tokens[:-1], 9),)), *held.kept[1:]])


def left_out(held):
    more = collections.Counter({oracle.LeftOut("id", "file:0", "null"): 1})
    return held._replace(left_out=held.left_out + more)


@pytest.mark.parametrize("change", [lost, renamed, other_token, left_out])
def test_a_difference_from_the_oracle_is_noticed(trial, change):
    trial.check("a")
    right = trial.wanted
    with pytest.MonkeyPatch.context() as patch:
        wrong = {name: of | {"train": change(of["train"])} for name, of in right().items()}
        patch.setattr(trial, "wanted", lambda: wrong)
        with pytest.raises(Difference, match=next(iter(wrong))):
            trial.check("a")


def test_a_window_that_is_read_twice_is_noticed():
    windows = runs.Windows.__new__(runs.Windows)
    windows.windows = [(1, 2), (3, 4), (5, 6)]
    windows.check_epochs([(3, 4), (1, 2), (5, 6), (5, 6)], None, False)
    with pytest.raises(Difference, match="epoch 1 reads 1 of 3 windows too often"):
        windows.check_epochs([(3, 4), (1, 2), (5, 6), (5, 6), (5, 6)], None, False)
    with pytest.raises(Difference, match="in the cache's order"):
        windows.check_epochs([(3, 4), (1, 2), (5, 6)], None, True)


def passed_over(opened):
    """Reads a file as Python's `bz2` does: what follows a stream and is none is its end."""

    class Passing(opened):
        def _advance(self):
            try:
                return super()._advance()
            except (OSError, EOFError, ValueError, lzma.LZMAError):
                return False

    return Passing


def planted(patch, fault):
    if fault == "streams":
        patch.setattr(compression, "_Streams", passed_over(compression._Streams))
    elif fault == "unknown":
        patch.setattr(pieces.SpecialIds, "of_unknown_text", None)
    elif fault == "token":
        patch.setattr(neighbours, "check", lambda *_: None)
    else:
        usual = documents.Limits.of
        patch.setattr(
            documents.Limits, "of", lambda *of: dataclasses.replace(usual(*of), may_be_empty=())
        )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("streams", r"damaged|instead of"),
        ("unknown", "unknown tokens"),
        ("token", "an added token in"),
        ("empty", "instead of"),
    ],
)
def test_a_planted_fault_is_found(fault, says, trial, tmp_path, monkeypatch):
    planted(monkeypatch, fault)
    (tmp_path / "shared").symlink_to(trial._vocabularies)
    found = (
        difference(builds.Trial(given("builds", seed=2), number, tmp_path), fault)
        for number in range(400)
    )
    assert re.search(says, next(filter(None, found)))


def difference(made, fault):
    """Returns what a trial that can show a planted fault finds, else an empty text."""
    kinds = made._kinds.values()
    fits = {
        "streams": all(kind.packing in (".bz2", ".xz") for kind in kinds) and len(kinds) == 1,
        "unknown": made._kind == "bert",
        "token": made._kind != "bytes",
        "empty": made._rules.keeps_empty_targets,
    }
    if not fits[fault] or made._runner:
        return ""
    made._add_files()
    if not made._is_buildable():
        return ""
    made.build("a").run()
    try:
        made.check("a")
        (made._damage if fault == "streams" else made._add_token)()
    except Difference as error:
        return str(error)
    return ""
