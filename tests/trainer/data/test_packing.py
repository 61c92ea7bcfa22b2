"""Rows of several examples: the same examples, losses and gradients, once an epoch, and full."""

import itertools

import numpy as np
import pytest

from tasks.objectives import Lengths, prefix_lm
from tasks.objectives.packing import deck
from tasks.objectives.ul2 import MixtureOfDenoisers
from tasks.terminal.command_line import UserError
from tests.support.parameters import slow_unless
from tests.support.runs import assert_shared, curve, done, pretrain, run
from tests.support.trees import assert_close
from tests.trainer.data.test_pairs import PAIRS, run_of
from tests.trainer.data.test_segments import losses_of
from trainer.data.best_fit import best_fit

PREFIX, UL2 = "python_docs_prefix_lm", "python_docs_ul2"
UNKNOWN = "python_docs_iid_15_u_u"  # an objective whose examples' lengths are not known
# Task -> lengths of rows, lengths of examples.
SHAPES = {
    PREFIX: ((64, 64), (63, 64)),
    UL2: ((6 * 48, 140), (48, 48)),
    PAIRS: ((128, 48), (64, 24)),
}


def packing_flags(task):
    """Returns the flags of `SHAPES`."""
    return [
        f"--{prefix}{side}={length}"
        for prefix, lengths in zip(("lengths.", "data.example_"), SHAPES[task], strict=True)
        for side, length in zip(("inputs", "targets"), lengths, strict=True)
    ]


def packed_run(folder, task, *flags, **more):
    """Returns a run with `SHAPES` of rows and of examples."""
    given = (*packing_flags(task), "--data.pack_examples=true", *flags)
    return run_of(folder, task, *given, **more)


@pytest.fixture(scope="module")
def caches(pairs_and_text, text_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing")
    (folder / PAIRS).symlink_to(pairs_and_text / PAIRS)
    for task in (PREFIX, UL2, UNKNOWN, "python_docs_masked_lm"):
        (folder / task).symlink_to(text_cache)
    return folder


def unpacked(run, step):
    """Returns the rows of a packed batch with one example each, and the row of each example."""
    data = run.data
    rows_E, places, members_of = data.batches().examples(step)
    source = data.sources[0]
    members = source.layout.members(
        data.batches()._schedule.places(step * run.config.batch_size, run.config.batch_size)[1]
    )
    assert np.array_equal(members.rows_E, rows_E)
    assert np.array_equal(members.windows_E, places.windows)
    assert len(members_of) == len(rows_E)
    keys_E = source.keys(members.epochs_E, members.windows_E)
    return source.maker.make_packed(
        members._replace(rows_E=np.arange(len(rows_E))), keys_E, len(rows_E)
    ), rows_E


def without_packing(batch):
    return {
        name: array
        for name, array in batch.items()
        if "segment" not in name and "positions" not in name
    }


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "preset"),
    slow_unless(
        {(UL2, "t5_1_1_tiny"), (PAIRS, "lm_tiny")},
        itertools.product(SHAPES, ["t5_1_1_tiny", "lm_tiny"]),
    ),
)
def test_packed_rows_have_the_losses_and_gradients_of_their_examples(caches, task, preset):
    run = packed_run(caches, task, "--batch_size=2", preset=preset)
    packed = run.data.batches()[3]
    single, rows_E = unpacked(run, 3)
    assert len(rows_E) > 2
    learned, loss = losses_of(run.config.model)
    of_rows, of_examples = learned(packed), learned(without_packing(single))
    np.testing.assert_allclose(of_rows[0], of_examples[0], rtol=2e-6)
    assert_close(of_rows[1], of_examples[1], scale=2e-5, atol=2e-8)

    # Without segments the rows are others: the comparison can fail.
    mixed = loss(without_packing(packed))
    assert abs(float(mixed) - float(of_examples[0])) > 1e-3


@pytest.mark.parametrize("task", SHAPES)
def test_every_window_is_read_once_an_epoch(caches, task):
    run = packed_run(caches, task)
    source = run.data.sources[0]
    count = len(source.maker.windows)
    steps = int(2 * source.layout.rows_per_epoch / 8) + 40
    found = [run.data.batches().examples(step)[1] for step in range(steps)]
    epochs, windows = (np.concatenate([getattr(each, name) for each in found])
                       for name in ("epochs", "windows"))  # fmt: skip
    for epoch in (0, 1):
        assert sorted(windows[epochs == epoch].tolist()) == list(range(count))


@pytest.mark.parametrize("task", SHAPES)
def test_rows_are_full_and_hosts_share_them(caches, task):
    data = packed_run(caches, task).data
    whole = data.batches()
    tokens = [whole[step] for step in range(12)]
    for name in ("encoder_input_tokens", "decoder_target_tokens"):
        filled = np.mean([np.mean(batch[name] > 0) for batch in tokens])
        assert filled > (0.9 if task != PAIRS else 0.6), (name, filled)
    assert_shared(data.batches, (0, 5, 10**6))


def test_packed_pairs_are_read_block_by_block(caches):
    run = packed_run(caches, PAIRS, "--data.shuffle=block", "--data.block_bytes=12000")
    data, source = run.data, run.data.sources[0]
    plan, firsts = source.packed.plan, source.maker.windows.blocks(12_000)
    assert len(firsts) > 3
    assert plan.firsts_R1[plan.blocks_B1].tolist() == firsts.tolist()
    asked = []
    source.maker.windows.prefetch = asked.append
    windows = []
    for step in itertools.count():
        data.batches()[step]
        found = data.batches().examples(step)[1]
        windows += found.windows[found.epochs == 0].tolist()
        if found.epochs.max():
            break
    assert sorted(windows) == list(range(len(source.maker.windows)))
    blocks = np.searchsorted(firsts, windows, side="right") - 1
    assert np.count_nonzero(np.diff(blocks)) == len(firsts) - 2  # each is read to its end
    ranges = {(first, last) for pair in asked for first, last in pair}
    assert ranges == set(itertools.pairwise(firsts.tolist()))
    assert asked[0][0] == (firsts[blocks[0]], firsts[blocks[0] + 1])
    assert_shared(data.batches, [3], [2])


def test_prefixes_of_mirrored_windows_are_uniform(caches):
    run = packed_run(caches, PREFIX)
    lengths = np.zeros(64, np.int64)
    for step in range(200):
        batch, _ = unpacked(run, step)
        lengths += np.bincount((batch["encoder_input_tokens"] > 0).sum(axis=1), minlength=64)
    drawn = lengths[2:62]  # a prefix of 1 to 61 tokens, and EOS
    assert lengths.sum() == lengths[2:63].sum()
    expected = drawn.mean()
    # Chi-squared with 60 degrees of freedom: 100 is exceeded once in a thousand draws.
    assert ((drawn - expected) ** 2 / expected).sum() < 2 * 100


def test_kinds_have_the_objectives_shares():
    objective = MixtureOfDenoisers()
    plan = deck(objective.kinds(Lengths(384, 384)), Lengths(2304, 1088), False)
    rates = [denoiser.rate for denoiser in objective.denoisers]
    shares = np.bincount(plan.choices_G) / plan.windows
    np.testing.assert_allclose(shares, np.array(rates) / sum(rates), atol=1e-12)
    assert min(plan.filled) > 0.9
    assert deck(prefix_lm().kinds(Lengths(511, 512)), Lengths(512, 512), False).filled == (1, 1)


def test_evaluation_reads_one_example_a_row(caches):
    run = packed_run(caches, UL2)
    (found,) = run.data.evaluation("validation", 8)
    batch = next(found.iterate())
    assert batch["encoder_input_tokens"].shape == (8, 48)
    assert "encoder_segment_ids" not in batch


def test_best_fit_keeps_the_limits_of_both_sides():
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(1, 60, 5000), generator.integers(1, 30, 5000)
    largest = np.argsort(-np.maximum(inputs * 40, targets * 100))
    inputs, targets = inputs[largest], targets[largest]
    rows = best_fit(inputs, targets, 100, 40)
    for side, limit in ((inputs, 100), (targets, 40)):
        assert np.bincount(rows, side).max() <= limit
    assert sorted(np.unique(rows)) == list(range(rows.max() + 1))
    most = max(inputs.sum() / 100, targets.sum() / 40)
    assert most <= rows.max() + 1 < 1.15 * most


def test_the_start_says_what_packed_rows_hold(caches):
    run = packed_run(caches, UL2)
    (source,) = run.data.sources
    examples = sum(len(run.data.batches().examples(step)[0]) for step in range(8))
    windows = examples / 8 / run.config.batch_size
    assert windows > 2
    expected = windows * source.maker.windows.window_tokens
    assert source.tokens_a_row == pytest.approx(expected, rel=0.15)
    # Advice on lengths of rows would be of one example each.
    assert "padding" not in dict(run.data.consequences())["packing"]


def test_mistakes(caches):
    with pytest.raises(UserError, match="too short to pack: two examples per row have 71 and 27"):
        packed_run(caches, UL2, "--lengths.inputs=50").data.batches()
    flags = "--data.pack_examples=true", "--data.example_inputs=32"
    with pytest.raises(UserError, match="cannot be packed because their lengths are unknown"):
        run_of(caches, UNKNOWN, *flags).data.batches()


PACK = [*packing_flags(UL2), "--data.pack_examples=true"]
CUT = ["--objective=too_long=cut"]
# Preset, task, lengths and flags.
RESUMED = {
    "pairs": ("t5_1_1_tiny", PAIRS, (64, 24), CUT),
    "pairs of a decoder": ("lm_tiny", PAIRS, (64, 24), CUT),
    "packed": ("t5_1_1_tiny", UL2, SHAPES[UL2][0], PACK),
    "masked": ("bert_tiny", "python_docs_masked_lm", (32, 32), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_a_run_resumes_exactly(caches, tmp_path, case):
    preset, task, lengths, flags = RESUMED[case]
    shape = {"preset": preset, "task": task, "lengths": lengths}
    for model, steps in (("whole", 4), ("stopped", 2), ("stopped", 4)):
        more = (
            f"--train_steps={steps}",
            "--checkpoint.every_steps=2",
            "--evaluation.every_steps=4",
        )
        done(pretrain(caches, tmp_path / model, *more, *flags, **shape))
    whole = curve(tmp_path / "whole")
    last = [line for line in curve(tmp_path / "stopped") if line["step"] > 2]
    assert last == [line for line in whole if line["step"] > 2]
    (results,) = (line["metrics"] for line in whole if line["split"] == "validation")
    if case == "masked":
        assert 0.4 < results["order_loss"] < 1.0
        assert 0 <= results["order_accuracy"] <= 1
    if case == "packed":
        longer = {**shape, "lengths": (lengths[0], lengths[0])}
        other = run(pretrain(caches, tmp_path / "whole", "--train_steps=6", **longer))
        assert other.returncode != 0
        assert "pack_examples" in other.stderr
