"""Batches left out by --data.skip: which batch an update reads, wherever batches are made."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.terminal.command_line import UserError
from tests.support.runs import assert_shared, config_of, run_of
from tests.support.trees import assert_equal
from trainer.config import config_changes
from trainer.config.skips import Skips

SKIP = ("--data.skip=3:5,8:9", "--train_steps=20")
READ = [1, 2, 5, 6, 7, 9, 10, 11, 12, 13]  # by updates 1 to 10


@given(st.lists(st.integers(1, 30), max_size=8, unique=True).map(sorted))
def test_updates_count_the_kept_batches(borders):
    ranges = list(zip(borders[::2], borders[1::2], strict=False))
    skips = Skips([f"{first}:{following}" for first, following in ranges])
    kept = [
        number
        for number in range(1, 80)
        if not any(first <= number < following for first, following in ranges)
    ]
    assert [skips.batch(update) for update in range(40)] == [0, *kept][:40]
    for batch in range(40):
        assert skips.updates(batch) == sum(number <= batch for number in kept)
        left_out = {n for n in range(1, batch + 1)} - set(kept)
        assert {n for pair in skips.up_to(batch) for n in range(*pair)} == left_out


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--task=python_docs_span_corruption=0.7,python_docs_prefix_lm=0.3",
         "--lengths.targets=96", "--mixing.schedule=4: python_docs_span_corruption=1"],
        ["--task=python_docs_prefix_lm", "--data.pack_examples=true", "--data.example_inputs=20",
         "--data.example_targets=20", "--lengths.targets=64"],
    ],
    ids=["one task", "mixture and schedule", "packed"],
)  # fmt: skip
def test_a_run_reads_the_batches_that_another_reads_without_the_skip(text_cache, flags):
    whole, skipping = (run_of(text_cache, *flags, *more).data for more in ((), SKIP))
    made = list(itertools.islice(whole.training(0), READ[-1]))
    wanted = [made[batch - 1] for batch in READ]
    assert_equal(list(itertools.islice(skipping.training(0), len(READ))), wanted)
    # Started between any two updates, and on several hosts.
    for begun in (1, 2, 3, 6):
        assert_equal(next(skipping.training(begun)), wanted[begun])
    assert_shared(skipping.batches, range(len(READ)))
    for data, steps in ((whole, READ), (skipping, range(1, 11))):
        data.last = [[rank for _, rank in data.batches().last_windows(n - 1)] for n in steps]
    assert skipping.last == whole.last
    # The rates of a mixture follow the batches.
    assert skipping.record == whole.record


def test_the_start_says_what_is_left_out(text_cache):
    flags = ["--task=python_docs_span_corruption=1,python_docs_prefix_lm=1", "--lengths.targets=96"]
    flags += ["--mixing.schedule=10: python_docs_prefix_lm=1"]
    lines = run_of(text_cache, *flags, *SKIP).data.consequences()
    said = [text for subject, text in lines if subject == "skip"]
    flag = "--data.skip=3:5,8:9 leaves out"
    assert said[0].startswith(f"{flag} batches 3 to 4: update 3 reads batch 5;")
    assert said[1].startswith(f"{flag} batch 8: update 6 reads batch 9;")
    # Batch 11 is the first with the new rates.
    assert any("from update 8 on" in text for _, text in lines)


@pytest.mark.parametrize("text", ["5:3", "3:3", "0:2", "3:6,5:8", "5:6,1:2", "3", "3:", "a:b"])
def test_ranges_that_overlap_or_end_before_they_begin_are_refused(text):
    with pytest.raises(UserError, match=rf"^--data\.skip={text}: it must be ranges FIRST:NEXT"):
        config_of(f"--data.skip={text}")


def test_a_skip_without_effect_is_refused():
    assert config_of("--data.skip=3:5,12:13", "--train_steps=10")
    with pytest.raises(UserError, match="begin up to batch 12, the last that --train_steps reads"):
        config_of("--data.skip=3:5,13:14", "--train_steps=10")


@pytest.mark.parametrize(
    ("before", "now", "step", "allowed"),
    [
        ("", "8:9", 7, True),
        ("", "8:9", 8, False),
        ("8:9", "", 7, True),
        ("8:9", "", 8, False),  # update 8 read batch 9
        ("3:5", "3:5,10:11", 7, True),  # update 7 read batch 9
        ("3:5", "3:5,9:10", 7, False),
        ("3:5", "3:4,4:5", 7, True),
        ("3:5", "4:6", 4, False),  # though update 4 reads batch 6 in both
        ("3:5", "3:6", 2, True),
        ("3:5", "3:6", 3, False),
    ],
)
def test_only_batches_that_were_not_read_may_change_on_resume(before, now, step, allowed):
    flags = [f"--data.skip={text}" if text else "--data.threads=1" for text in (before, now)]
    found = config_changes(*(config_of(flag) for flag in flags), step)
    assert bool(found) != allowed
    if not allowed:
        (said,) = found
        assert said.startswith(f"data.skip was {before or 'unset'}, is {now or 'unset'}")
        assert "only --rewind_to an earlier" in said


def test_a_schedule_of_rates_counts_batches_on_resume():
    skip, to = "--data.skip=3:5", "--mixing.schedule={}: python_docs_prefix_lm=1"
    for entry, allowed in ((9, False), (10, True)):
        # After update 8, ten batches have passed, so the rates of batch 10 are in use.
        changed = config_changes(config_of(skip), config_of(skip, to.format(entry)), 8)
        assert bool(changed) != allowed
