"""Batches that change their rows: where these lie, wherever they are made; tokens as units."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from tests.support.runs import assert_shared, config_of, flags_of, run_of
from tests.support.trees import assert_equal
from trainer.config import config_changes
from trainer.config.batch_of_tokens import batch_of_tokens
from trainer.config.from_flags import build_config
from trainer.config.phases import Phase, Phases, in_updates, tokens_of
from trainer.config.skips import Skips
from trainer.data.order import NestedOrder

LENGTHS = Lengths(64, 18)
SCHEDULE = "--batch_schedule=3: 8; 5: 2"  # beside 4 rows
ROWS = [4, 4, 4, 8, 8, 2, 2, 2, 2]
MIXED = [
    *("--task=python_docs_span_corruption=0.7,python_docs_prefix_lm=0.3", "--lengths.targets=96"),
    "--mixing.schedule=4: python_docs_span_corruption=1",
]


@given(
    st.lists(st.integers(1, 30), max_size=5, unique=True).map(sorted),
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.lists(st.integers(1, 40), max_size=6, unique=True).map(sorted),
)
def test_batches_lie_one_after_another(begins, sizes, borders):
    ranges = list(zip(borders[::2], borders[1::2], strict=False))
    skips = Skips([f"{first}:{following}" for first, following in ranges])
    phases = Phases(
        [Phase(*each, LENGTHS) for each in zip([0, *begins], sizes, strict=False)], skips
    )
    rows = [sizes[sum(begin < batch for begin in begins)] for batch in range(1, 60)]
    assert [phases.of(batch).rows for batch in range(1, 60)] == rows
    ends = [0, *itertools.accumulate(rows)]
    assert [phases.passed(batch) for batch in range(60)] == ends
    for count in range(ends[-1]):
        assert phases.batches(count) == sum(end <= count for end in ends[1:])
    kept = [n for n in range(1, 60) if not any(first <= n < end for first, end in ranges)]
    read = [0, *itertools.accumulate(rows[batch - 1] for batch in kept)]
    assert [phases.read(update) for update in range(15)] == read[:15]
    for count in range(1, read[14] + 1):
        assert phases.updates(count) == sum(each < count for each in read)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        MIXED,
        ["--task=python_docs_prefix_lm", "--data.pack_examples=true", "--data.example_inputs=20",
         "--data.example_targets=20", "--lengths.targets=64"],
    ],
    ids=["one task", "mixture and schedule", "packed"],
)  # fmt: skip
def test_a_change_of_rows_loses_and_repeats_none(text_cache, flags):
    data = run_of(text_cache, *flags, SCHEDULE).data
    made = list(itertools.islice(data.training(0), len(ROWS)))
    assert [len(batch["decoder_target_tokens"]) for batch in made] == ROWS
    # The rates change after 4 batches, which are 20 rows.
    one = [each.replace("=4: ", "=20: ") for each in flags]
    single = run_of(text_cache, *one, "--batch_size=1").data
    rows = list(itertools.islice(single.training(0), sum(ROWS)))
    joined, wanted = (
        {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        for batches in (made, rows)
    )
    assert_equal(joined, wanted)
    # Started between any two updates, and on two hosts.
    for begun in (2, 3, 4, 5, 7):
        assert_equal(next(data.training(begun)), made[begun])
    assert_shared(data.batches, range(len(ROWS)), hosts=(2,))
    lasts = [
        [rank for _, rank in batches.last_windows(step)]
        for batches, step in ((data.batches(), 3), (single.batches(), 19))
    ]
    assert max(lasts[0]) >= max(lasts[1])


def test_a_phase_follows_the_batch_when_batches_are_skipped(text_cache):
    whole, skipping = (
        run_of(text_cache, SCHEDULE, *more).data for more in ([], ["--data.skip=2:5"])
    )
    made = list(itertools.islice(whole.training(0), 8))
    assert_equal(list(itertools.islice(skipping.training(0), 5)), [made[0], *made[4:]])
    lines = [text for _, text in skipping.consequences()]
    assert "from update 2 on, after 256 tokens: 8 rows a batch" in lines
    assert "from update 3 on, after 768 tokens: 2 rows a batch" in lines


def test_of_changes_at_one_update_the_last_is_said(text_cache):
    skipping = run_of(text_cache, "--batch_schedule=3: 8; 5: 2", "--data.skip=2:6").data
    lines = [text for _, text in skipping.consequences() if text.startswith("from update 2 on")]
    assert lines == ["from update 2 on, after 256 tokens: 2 rows a batch"]


def test_the_start_says_the_phases(text_cache):
    said = run_of(text_cache, SCHEDULE).data.consequences()
    place = next(place for place, line in enumerate(said) if line[0] == "batch")
    assert said[place][1].startswith("4 rows, ")
    assert [text for _, text in said[place + 1 : place + 3]] == [
        "from update 4 on, after 768 tokens: 8 rows a batch",
        "from update 6 on, after 1,792 tokens: 2 rows a batch",
    ]


def test_a_change_after_the_last_update_is_warned_of(text_cache):
    said = run_of(text_cache, "--batch_schedule=9: 8", "--train_steps=5").data.consequences()
    assert ("warning", "the run ends at update 5, before its schedule's change at 10") in said


def converted(*flags):
    config, origins = build_config("t5_1_1_tiny", flags_of("nowhere", "nowhere", *flags))
    return in_updates(config, origins), origins


def test_tokens_become_updates():
    # 4 rows of 64 tokens are 256 tokens, so 1,000 tokens are reached by the fourth batch.
    config, origins = converted("--batch_schedule=1K: 8; 2K: 2", "--train_tokens=3K")
    assert config.batch_schedule == "4: 8; 6: 2"  # after 1,024 and 2,048 tokens
    assert config.train_steps == 14  # after 3,072
    assert config.train_tokens is None
    assert origins["train_steps"] == "--train_tokens=3K"
    # Converted once: another time changes nothing.
    assert in_updates(config, origins) == config
    assert converted("--train_tokens=256.001K", "--batch_size=1000")[0].train_steps == 5
    skipping, _ = converted("--train_tokens=1K", "--data.skip=2:4", "--batch_schedule=4: 8")
    assert skipping.train_steps == 3  # batches 1, 4 and 5 have 1,024 tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2B", 2 * 10**9), ("1.5B", 1500 * 10**6), ("500M", 5 * 10**8), ("0.5K", 500), ("2", None),
     ("0.0001K", None), ("2b", None), ("-1K", None)],
)  # fmt: skip
def test_amounts_of_tokens(text, tokens):
    assert tokens_of(text) == tokens


@pytest.mark.parametrize(
    "text", ["5", "5:", "5: 0", "0: 4", "5: 4; 5: 8", "6: 4; 5: 8", "5: 4, 6: 8", "2B: 4; 1B: 8"]
)
def test_schedules_that_are_none_are_refused(text):
    with pytest.raises(UserError, match=r"--batch_schedule=.*: it must be BOUNDARY: ROWS"):
        config_of(f"--batch_schedule={text}")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch_schedule=10: 8; 1K: 16"], "boundaries must ascend, but an entry comes before"),
        (["--train_tokens=1K", "--train_steps=3"], "alternatives: set only one"),
        (["--train_tokens=1000T", "--batch_size=1"], "train_steps"),
    ],
)
def test_conversions_that_fail_are_refused(flags, says):
    with pytest.raises(UserError, match=says):
        converted(*flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--batch_schedule=3: 6", "--mesh.data=4"],
            "--batch_schedule: 6 rows cannot be divided among 4",
        ),
        (
            ["--batch_schedule=3: 6", "--microbatches=4"],
            "6 rows cannot be divided among 1 .* in each",
        ),
        (
            ["--batch_schedule=3: 6", "--tokens_per_microbatch_per_replica=64"],
            "a batch needs 6 parts, but all batches of --batch_schedule=3: 6 divide into 2 at most",
        ),
    ],
)
def test_every_phase_is_checked_at_the_start(text_cache, flags, says):
    with pytest.raises(UserError, match=says):
        run_of(text_cache, *flags)


def test_microbatches_of_tokens_fit_the_largest_phase():
    flags = ["--batch_schedule=3: 24; 9: 12", "--tokens_per_microbatch_per_replica=512"]
    config, origins = build_config("t5_1_1_tiny", flags_of("nowhere", "nowhere", *flags))
    # Of 24 rows, 8 fit: 3 parts, but 4 rows divide into 4.
    assert batch_of_tokens(config, origins, LENGTHS, devices=1).microbatches == 4
    # 24 rows of 64 tokens and 4 rows of 256 both need 3 parts or fewer.
    flags[0] = "--length_schedule=3: inputs=256"
    config, origins = build_config(
        "t5_1_1_tiny", flags_of("nowhere", "nowhere", *flags, "--batch_schedule=3: 2")
    )
    assert batch_of_tokens(config, origins, LENGTHS, devices=1).microbatches == 1


@pytest.mark.parametrize(
    ("before", "now", "step", "allowed"),
    [
        ("", "8: 2", 8, True),
        ("", "8: 2", 9, False),
        ("8: 2", "8: 4", 8, True),
        ("8: 2", "8: 4", 9, False),
        ("3: 2; 8: 2", "3: 2; 9: 2", 8, True),
    ],
)
def test_only_later_batches_may_change_on_resume(before, now, step, allowed):
    found = config_changes(*(config_of(f"--batch_schedule={text}") for text in (before, now)), step)
    assert bool(found) != allowed
    if not allowed:
        assert found[0].startswith(f"batch_schedule was {before!r}, is {now!r}, different before")


def test_a_seqio_task_refuses_a_schedule():
    from trainer.config.unused_fields import refuse_unread

    flags = ["--task=seqio:theirs", "--batch_schedule=3: 6"]
    with pytest.raises(UserError, match="--batch_schedule has no effect on --task=seqio:theirs"):
        refuse_unread(*build_config("t5_1_1_tiny", flags))


LONGER = "--length_schedule=6: inputs=256,targets=66; 20: inputs=128,targets=34"
LM = [
    *("--task=python_docs_lm", "--lengths.inputs=0", "--lengths.targets=32"),
    "--length_schedule=6: targets=256; 20: targets=128",
]


def spans(batches, step):
    """Returns (source, epoch) -> [(begin, end)] of the rows of a batch in the stream of tokens."""
    found = {}
    places = batches.places(step)
    for source, epoch, window in zip(places.sources, places.epochs, places.windows, strict=True):
        windows = batches.sources(step)[source].maker.windows
        begin, end = (int(each[0]) for each in windows._extents(np.array([window])))
        found.setdefault((int(source), int(epoch)), []).append((begin, end))
    return found


@pytest.mark.parametrize(
    ("flags", "preset"),
    [
        ([LONGER], "t5_1_1_tiny"),
        ([LONGER, "--data.shuffle=none", "--batch_schedule=8: 2; 30: 4"], "t5_1_1_tiny"),
        (
            [
                *MIXED[:2],
                LONGER.replace("66", "255").replace("34", "127"),
                "--mixing.schedule=9: python_docs_span_corruption=1",
            ],
            "t5_1_1_tiny",
        ),
        (LM, "lm_tiny"),
    ],
    ids=["one task", "in the cache's order", "mixture and schedule", "language model"],
)
def test_a_change_of_length_repeats_nothing_in_an_epoch(text_cache, flags, preset):
    data = run_of(text_cache, *flags, preset=preset).data
    batches = data.batches()
    total = len(data.sources[0].maker.windows) * data.sources[0].maker.windows.window_tokens
    read = {}
    for step in range(150):
        for key, several in spans(batches, step).items():
            read.setdefault(key, []).extend(several)
    assert len(read) > len(data.tasks)  # more than an epoch
    for several in read.values():
        borders = [place for pair in sorted(several) for place in pair]
        assert borders == sorted(borders)
    first = sum(end - begin for begin, end in read[0, 0])
    assert first > 0.9 * total
    # Started between any two updates, and on two hosts.
    made = list(itertools.islice(data.training(0), 24))
    for begun in (5, 6, 7, 19, 20):
        assert_equal(next(data.training(begun)), made[begun])
    assert_shared(data.batches, (0, 5, 6, 19, 20, 149), hosts=(2,))
    side = "decoder_target_tokens" if preset == "lm_tiny" else "encoder_input_tokens"
    widths = [made[step][side].shape[1] for step in (5, 6, 19, 20)]
    assert widths == ([32, 256, 256, 128] if preset == "lm_tiny" else [64, 256, 256, 128])


def test_an_epoch_of_nested_windows_reads_each_once():
    for count, per in ((1, 1), (5, 3), (200, 4), (3000, 2)):
        order, ranks = NestedOrder(count, per, 3), np.arange(count * per)
        epochs = [order(np.full(len(ranks), epoch), ranks) for epoch in range(2)]
        assert all(sorted(each) == ranks.tolist() for each in epochs)
        assert count == 1 or epochs[0].tolist() != epochs[1].tolist()
        for rank in {0, 1, count, count * per - 1, count * per}:
            begin = order.begin(order.untouched(rank))
            assert rank <= begin <= count * per
            seen, rest = epochs[0][:rank] // per, epochs[0][begin:] // per
            assert not {*seen} & {*rest}
            # In the second epoch, it is the same, a whole epoch later.
            assert order.begin(order.untouched(rank + count * per)) == begin + count * per


def test_what_lengths_that_change_exclude_is_refused(text_cache):
    for flags in (
        ["--data.take=0.5"],
        ["--data.shuffle=block"],
        ["--data.pack_examples=true", "--task=python_docs_prefix_lm"],
    ):
        with pytest.raises(UserError, match="--length_schedule cannot be combined with --data"):
            run_of(text_cache, LONGER, *flags).data.batches()
    with pytest.raises(UserError, match="one phase must have both the longest inputs and targets"):
        run_of(text_cache, "--length_schedule=6: inputs=256,targets=4", training=True)


def test_every_length_is_checked_at_the_start(text_cache):
    flags = ["--lengths.inputs=64", "--lengths.targets=10", "--length_schedule=6: inputs=2000"]
    with pytest.raises(UserError, match="rows have 2000 positions, the model has"):
        run_of(text_cache, *flags, task="python_docs_masked_lm", preset="bert_tiny")


@pytest.mark.parametrize(
    ("before", "now", "step", "says"),
    [
        ("6: inputs=256", "6: inputs=256; 9: inputs=128", 9, ""),
        ("6: inputs=256", "6: inputs=256; 9: inputs=128", 10, "length_schedule was"),
        ("6: inputs=256", "6: inputs=512", 6, "the longest rows"),
        ("", "6: inputs=256", 1, "the longest rows of length_schedule were unset, are"),
        ("", "6: inputs=256", 0, ""),
    ],
)
def test_only_later_lengths_may_change_on_resume(before, now, step, says):
    configs = [
        config_of("--lengths.inputs=64", "--lengths.targets=34", f"--length_schedule={text}")
        for text in (before, now)
    ]
    found = config_changes(*configs, step)
    assert any(each.startswith(says) for each in found) if says else not found
