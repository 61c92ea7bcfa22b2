"""BERT's objective: the chosen tokens, their replacements, and the two segments."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.objectives import Lengths, noise
from tasks.objectives.masked_lm import MaskedLM
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds

SIZE, LENGTHS = 1000, Lengths(128, 128)
MASK, CLASSIFY = 999, 998


class Ids(TokenIds):
    """A vocabulary in which every third id begins a word."""

    @functools.cached_property
    def word_starts(self):
        return np.arange(self.size) % 3 == 0


IDS = Ids(SIZE, 100)


def made_of(sizes, seed=0):
    generator = np.random.default_rng(seed)
    sizes = np.array(sizes)
    tokens = generator.integers(3, 900, (len(sizes), int(sizes.max()))).astype(np.int32)
    tokens[np.arange(tokens.shape[1]) >= sizes[:, None]] = 0
    keys = noise.fold_in(seed, np.arange(len(sizes)))
    made = MaskedLM().examples(tokens, sizes, keys, LENGTHS, IDS)
    return tokens, made


@given(st.lists(st.integers(1, 125), min_size=1, max_size=8), st.integers(0, 2**32))
def test_inputs_are_two_segments_in_either_order(sizes, seed):
    tokens, made = made_of(sizes, seed)
    for row, size in enumerate(sizes):
        targets, weights, segments = (
            made[name][0][row, : made[name][1][row]] for name in ("targets", "weights", "segments")
        )
        assert len(targets) == size + 3
        ends = np.flatnonzero(targets == 1)
        assert len(ends) == 2
        assert ends[1] == size + 2
        assert targets[0] == CLASSIFY
        first, second = targets[1 : ends[0]], targets[ends[0] + 1 : ends[1]]
        swapped = bool(made["order"][0][row, 0])
        joined = [*second, *first] if swapped else [*first, *second]
        assert joined == tokens[row, :size].tolist()
        split = first if swapped else second
        # By place: numbers by origin would tell the order that is to be learned.
        assert (segments[: ends[0] + 1] == 1).all()
        assert (segments[ends[0] + 1 :] == 2).all()
        if len(split):
            assert split[0] % 3 == 0
        special = [0, *ends]
        assert not weights[special].any()
        inputs = made["inputs"][0][row, : size + 3]
        assert (inputs[weights == 0] == targets[weights == 0]).all()


def chosen_words(tokens, chosen):
    """Returns the words of a window, and which of them are chosen."""
    starts = np.flatnonzero(tokens % 3 == 0)
    starts = np.unique([0, *starts])
    words = np.split(chosen, starts[1:])
    assert all(len(set(word)) == 1 for word in words)
    return np.array([word[0] for word in words])


def test_words_begin_with_their_pieces_and_after_documents():
    tokens = np.array([[4, 5, 6, 7, 1, 8, 8, 0]])
    starts = MaskedLM()._word_starts(tokens, np.array([7]), IDS)
    # The window's first token, 6 as a piece that begins a word, and what follows EOS.
    assert starts[0].tolist() == [True, False, True, False, False, True, False, False]


def test_whole_words_are_chosen_up_to_the_planned_count():
    objective, windows = MaskedLM(), 2000
    tokens, _ = made_of([125] * windows)
    sizes, keys = np.full(windows, 125), noise.fold_in(0, np.arange(windows))
    starts = objective._word_starts(tokens, sizes, IDS)
    chosen = objective._choose(starts, sizes, keys)
    counts = chosen.sum(axis=1)
    assert counts.max() <= round(125 * 0.15)
    assert (counts == 19).mean() > 0.97  # as good as always some word fits what is left
    runs = []
    for row, mask in zip(tokens, chosen, strict=True):
        words = chosen_words(row, mask)
        runs += np.diff(np.flatnonzero(np.diff([False, *words, False])))[::2].tolist()
    # Runs that touch count as one here; n in proportion to 1 / n leaves one word the commonest.
    shares = np.bincount(runs, minlength=8)[1:4] / len(runs)
    assert shares[0] > shares[1] > shares[2] > 0.05
    # No place is preferred, but for the ends of a window, where runs are cut.
    inner = chosen.mean(axis=0)[10:-10]
    assert np.abs(inner - inner.mean()).max() < 5 * np.sqrt(0.15 * 0.85 / windows)


def test_lengths_of_runs():
    """N is 1, 2 or 3 in the ratio 6 : 3 : 2, if three tokens are chosen in all."""
    objective, windows = MaskedLM(noise_density=0.03), 20_000
    starts = np.ones((windows, 100), bool)  # words of one token, budget 3: the first run shows n
    sizes, keys = np.full(windows, 100), noise.fold_in(2, np.arange(windows))
    chosen = objective._choose(starts, sizes, keys)
    assert (chosen.sum(axis=1) == 3).all()
    runs = noise.run_starts(chosen).sum(axis=1)
    # One run: n is 3 at first. Three: it is 1 twice. By chance runs touch, 3 to 6 in 100.
    assert (runs == 1).mean() == pytest.approx(2 / 11, abs=0.03)
    assert (runs == 3).mean() == pytest.approx((6 / 11) ** 2, abs=0.03)


def test_lengths_and_pieces():
    assert MaskedLM().window_tokens(LENGTHS) == 125
    assert MaskedLM().sentinels(LENGTHS) == 2
    assert MaskedLM(mask="[MASK]", classify="[CLS]").sentinels(LENGTHS) == 0
    with pytest.raises(UserError, match="128"):
        MaskedLM().window_tokens(Lengths(128, 64))
    with pytest.raises(UserError, match="5"):
        MaskedLM().window_tokens(Lengths(4, 4))
