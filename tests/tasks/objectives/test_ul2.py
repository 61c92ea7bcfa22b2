"""UL2's mixture: shares and modes of denoisers, and rows made by them."""

import numpy as np
import pytest

from tasks.objectives import Lengths, noise, prefix_lm, span_corruption
from tasks.objectives.ul2 import Denoiser, MixtureOfDenoisers, ul2_denoisers
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds
from tests.support.spans import rebuilt

IDS = TokenIds(32_100, 100)
LENGTHS = Lengths(384, 384)


def batch(objective, windows, lengths=LENGTHS, seed=0):
    size = objective.window_tokens(lengths)
    generator = np.random.default_rng(seed)
    tokens = generator.integers(3, 30_000, (windows, size)).astype(np.int32)
    return tokens, np.full(windows, size), noise.fold_in(seed, np.arange(windows))


def test_the_denoisers_are_those_of_ul2():
    # Source: Tay et al. 2022, table 1: (mean span, density) of the denoisers.
    spans = [
        (each.objective.mask.mean_noise_span_length, each.objective.mask.noise_density)
        for each in ul2_denoisers()[:-1]
    ]
    assert spans[:2] == [(3, 0.15), (8, 0.15)]
    assert spans[2:] == [(3, 0.5), (8, 0.5), (64, 0.15), (64, 0.5)]
    assert ul2_denoisers()[-1].objective == prefix_lm(0.25)
    rates = [each.rate for each in ul2_denoisers("r", "x", "s", 0.2)]
    np.testing.assert_allclose(rates, [0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.2])


@pytest.mark.parametrize("rates", [(1, 1, 1), (5, 3, 0.2), (0, 1, 3)])
def test_shares_follow_the_rates(rates):
    mixture = MixtureOfDenoisers(
        tuple(Denoiser(span_corruption(), rate, "<extra_id_99>") for rate in rates)
    )
    counts = np.bincount(mixture.choices(noise.fold_in(1, np.arange(20_000))), minlength=3)
    expected = 20_000 * np.array(rates) / sum(rates)
    assert not counts[expected == 0].any()
    kept = expected > 0
    # 13.8: chi-square of 2 degrees of freedom, once in a thousand.
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 13.8


def test_every_row_is_made_by_its_denoiser():
    mixture = MixtureOfDenoisers()
    tokens, sizes, keys = batch(mixture, 400)
    made = mixture.examples(tokens, sizes, keys, LENGTHS, IDS)
    seen = set()
    for row, choice in enumerate(mixture.choices(keys)):
        denoiser = mixture.denoisers[choice]
        inputs, targets = (
            made[name][0][row, : made[name][1][row]] for name in ("inputs", "targets")
        )
        assert inputs[0] == IDS.id_of(denoiser.mode)
        assert inputs[-1] == targets[-1] == 1
        inner = Lengths(383, 384)
        taken = denoiser.objective.window_tokens(inner)
        part = rebuilt(inputs[1:-1], targets[:-1], 32_001)
        assert len(part) == taken
        first = np.flatnonzero(tokens[row] == part[0])
        assert any(tokens[row, at : at + taken].tolist() == part for at in first)
        if choice < 6:
            bounds = denoiser.objective.mask.bounds(taken)
            assert len(targets) == bounds.tokens_and_spans + 1
            assert (targets > 32_000).sum() == (inputs[1:] > 32_000).sum() == bounds.spans
        else:
            assert not (targets > 32_000).any()
            assert 0 < len(targets) - 1 <= 0.5 * taken + 1
        seen.add(int(choice))
    assert seen == set(range(7))


def test_rows_do_not_depend_on_their_batch():
    mixture = MixtureOfDenoisers()
    tokens, sizes, keys = batch(mixture, 40)
    whole = mixture.examples(tokens, sizes, keys, LENGTHS, IDS)
    for row in range(40):
        one = slice(row, row + 1)
        alone = mixture.examples(tokens[one], sizes[one], keys[one], LENGTHS, IDS)
        for name in ("inputs", "targets"):
            np.testing.assert_array_equal(alone[name][0][0], whole[name][0][row])


def test_a_part_can_be_anywhere_in_its_window():
    mixture = MixtureOfDenoisers((Denoiser(prefix_lm(), 1, "<extra_id_99>"),))
    longer = MixtureOfDenoisers(
        (*mixture.denoisers, Denoiser(span_corruption(0.5, 64.0), 1e-9, "<extra_id_98>"))
    )
    tokens, sizes, keys = batch(longer, 3000)
    made = longer.examples(tokens, sizes, keys, LENGTHS, IDS)["inputs"][0]
    first = np.argmax(tokens == made[:, 1:2], axis=1)
    most = sizes[0] - mixture.window_tokens(LENGTHS)
    counts, _ = np.histogram(first, bins=10, range=(0, most + 1))
    assert ((counts - 300) ** 2 / 300).sum() < 27.9  # 9 degrees of freedom, 1 in 1000


def test_short_windows_are_denoised():
    mixture = MixtureOfDenoisers()
    tokens, sizes, keys = batch(mixture, 60)
    sizes = np.arange(60) % 5 + 1
    tokens[np.arange(tokens.shape[1]) >= sizes[:, None]] = 0
    made = mixture.examples(tokens, sizes, keys, LENGTHS, IDS)
    for row, size in enumerate(sizes):
        inputs = made["inputs"][0][row, 1 : made["inputs"][1][row] - 1]
        targets = made["targets"][0][row, : made["targets"][1][row] - 1]
        text = [token for token in (*inputs, *targets) if token <= 32_000]
        assert sorted(text) == sorted(tokens[row, :size])


def test_impossible_mixtures_are_rejected():
    mixture = MixtureOfDenoisers()
    with pytest.raises(UserError, match="makes targets of up to"):
        mixture.window_tokens(Lengths(384, 300))
    with pytest.raises(UserError, match="needs 127 sentinels, but <extra_id_97> is a mode"):
        mixture.sentinels(Lengths(512, 512))
    named = MixtureOfDenoisers(ul2_denoisers("[R]", "[X]", "[S]"))
    assert named.sentinels(Lengths(512, 512)) == 127
    with pytest.raises(UserError, match=r"no piece \[R\].*--user_defined_symbols"):
        IDS.id_of(named.pieces[0])
    with pytest.raises(UserError, match="neither"):
        TokenIds(10, 0).id_of("[R]")
    with pytest.raises(ValueError, match="negative"):
        MixtureOfDenoisers((Denoiser(prefix_lm(), -1, "[R]"),))
