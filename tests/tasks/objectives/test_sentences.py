"""Sentences in windows of tokens, and the pairs that masked LM makes of them."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest

from tasks.objectives import Lengths, noise
from tasks.objectives.masked_lm import MaskedLM
from tasks.objectives.sentences import sentence_starts
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rejected
from tasks.vocabularies import pieces
from tasks.vocabulary import NORMAL, TokenIds

SPACE = "\u2581"


@dataclasses.dataclass(frozen=True)
class Pieces(TokenIds):
    """A vocabulary of given pieces."""

    given: tuple[str, ...] = ()

    @functools.cached_property
    def _of_file(self):
        texts = [piece.replace(SPACE, " ") for piece in self.given]
        return pieces.Pieces(list(self.given), [NORMAL] * len(self.given), texts)


def tokenised(text, longest=3):
    """Returns a vocabulary of pieces of at most `longest` letters, and the ids of the text."""
    cut = [
        piece
        for word in text.split()
        for piece in re.findall(rf"\w{{1,{longest}}}|\W", SPACE + word.replace("|", ""))
    ]
    joined = []
    for piece in cut:  # the mark of a space belongs to the piece after it
        if joined and joined[-1] == SPACE:
            joined[-1] += piece
        else:
            joined.append(piece)
    known = ("<pad>", "</s>", "<unk>", *dict.fromkeys(joined))
    ids = Pieces(len(known) + 4, 4, given=known)
    return ids, np.array([known.index(piece) for piece in joined], np.int32)


TEXTS = {
    "plain": "One came. |Two went! |Was it three? |Yes… |Four.",
    "titles": "Dr. Smith met Mr. Brown. |They talked. |Prof. Popescu și dl. Ionescu au plecat.",
    "initials": "J. R. R. Tolkien wrote it. |The U.S. Navy read it. |În S.U.A. Maria a stat.",
    "numbers": "It cost 3.14 lei. |See fig. 3 and art. 5 now. |A trecut la nr. 7. |Apoi gata.",
    "small": "It ended etc. and so on. |A venit la ora 5 p.m. aici.",
    "number_after": "He left in 2010. |12 men stayed. |Avea 3 art. |Apoi plecă.",
    "quotes": '"Come!" |"No." |He said: „Da.” |«Bine.» |(So it was.) |Then nothing.',
    "dialogue": "– Vii? – întrebă el. |– Nu. |– De ce?",
    "romanian": "Țara e mare. |Știu asta. |Însă Ștefan nu știe! |Étienne, oui.",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("longest", [2, 30])
def test_rules(name, longest):
    text = TEXTS[name]
    ids, tokens = tokenised(text, longest)
    starts = sentence_starts(tokens[None], np.array([len(tokens)]), ids)[0]
    shown, words = "", iter(starts)
    for token in tokens:
        piece = ids.pieces[token]
        shown += ("|" if next(words) else "") + piece
    # The mark is before the space that begins a word.
    expected = "|" + SPACE + text.replace(" |", "|" + SPACE).replace(" ", SPACE)
    assert shown == expected


def test_documents_line_feeds_and_padding():
    known = ("<pad>", "</s>", "<unk>", f"{SPACE}ab", ".", "\n", f"{SPACE}B")
    ids = Pieces(len(known), 0, given=known)
    tokens = np.array([[3, 1, 3, 5, 3, 4, 3, 4, 6, 4, 0, 0]], np.int32)
    starts = sentence_starts(tokens, np.array([10]), ids)[0]
    assert np.flatnonzero(starts).tolist() == [0, 2, 4, 8]
    # The end of a document belongs to its last sentence.
    ended = np.array([[3, 4, 1, 6]], np.int32)
    starts = sentence_starts(ended, np.array([4]), ids)[0]
    assert starts.tolist() == [True, False, False, True]
    # Without capitals in the vocabulary every word may begin a sentence.
    small = Pieces(6, 0, given=known[:6])
    starts = sentence_starts(tokens.clip(max=5), np.array([10]), small)[0]
    assert 6 in np.flatnonzero(starts)


def test_the_piece_with_id_0_pads_no_word():
    """In GPT-2 and Llama 3 it is an exclamation mark."""
    known = ("!", "</s>", f"{SPACE}Mr", ".", f"{SPACE}Smith", f"{SPACE}came", f"{SPACE}He")
    ids = Pieces(len(known), 0, given=known, special=pieces.SpecialIds(None, 1, None))
    tokens = np.array([[6, 5, 3, 2, 3, 4, 5, 0, 6, 5]], np.int32)
    starts = sentence_starts(tokens, np.array([10]), ids)[0]
    assert np.flatnonzero(starts).tolist() == [0, 3, 8]


@pytest.mark.parametrize(
    "known", [("A", "C", "G", "T"), (f"{SPACE}a", "漢", "字かな", "ไทย"), ("中", "文", SPACE, "字")]
)
def test_text_without_spaces_is_masked_piece_by_piece(known):
    known = ("<pad>", "</s>", "<unk>", *known)
    ids = Pieces(len(known) + 4, 4, given=known)
    generator = np.random.default_rng(0)
    tokens = generator.choice([n for n, piece in enumerate(known) if n > 2 and SPACE not in piece],
                              (40, 100)).astype(np.int32)  # fmt: skip
    sizes, keys = np.full(40, 100), noise.fold_in(0, np.arange(40))
    made = MaskedLM(classify="<extra_id_0>", mask="<extra_id_1>").examples(
        tokens, sizes, keys, Lengths(128, 128), ids
    )
    assert 0.14 < made["weights"][0].sum() / tokens.size < 0.16


# Sentences of 1 to 20 words of one token, ended by a full stop of its own; documents of some.
PIECES = ("<pad>", "</s>", "<unk>", ".", *(f"{SPACE}W{n}" for n in range(500)))
IDS = Pieces(len(PIECES) + 10, 10, given=PIECES)
LENGTHS = Lengths(128, 128)


def windows_of(objective, count, seed=0, mean_sentences=6, lengths=LENGTHS):
    random = np.random.default_rng(seed)
    width = objective.window_tokens(lengths)
    total, stream = count * width, []
    while len(stream) < total:
        for _ in range(1 + random.poisson(mean_sentences - 1)):
            stream += [*random.integers(4, len(PIECES), random.integers(1, 21)), 3]
        stream.append(1)
    tokens = np.array(stream[:total], np.int32).reshape(count, width)
    keys = noise.training_keys(seed, "it", 0, np.arange(count))
    return tokens, np.full(count, width), keys


def parts(made, row):
    """Returns A or B as they stand, first and second, without special tokens."""
    size = made["targets"][1][row]
    targets, segments = (made[name][0][row, :size] for name in ("targets", "segments"))
    first = targets[segments == 1]
    second = targets[segments == 2]
    assert first[0] == IDS.size - 2
    assert first[-1] == second[-1] == 1
    return first[1:-1].tolist(), second[:-1].tolist()


@pytest.mark.parametrize("pairs", ["order", "next"])
@pytest.mark.parametrize("split", ["words", "sentences"])
def test_pairs_are_text_of_the_window(pairs, split):
    objective = MaskedLM(split=split, pairs=pairs, short_share=0.3 * (split == "sentences"))
    tokens, sizes, keys = windows_of(objective, 400)
    made = objective.examples(tokens, sizes, keys, LENGTHS, IDS)
    told = made["order"][0][:, 0]
    short = 0
    for row in range(400):
        first, second = parts(made, row)
        window = tokens[row].tolist()
        if pairs == "order" and told[row]:
            first, second = second, first
        assert window[: len(first)] == first
        assert len(first) + len(second) <= 125
        short += len(first) + len(second) < 125
        if pairs == "next" and told[row]:
            where = next(
                place
                for place in range(len(first), len(window))
                if window[place : place + len(second)] == second
            )
            assert 1 in window[len(first) : where]
        else:
            assert window[len(first) : len(first) + len(second)] == second
            # It goes on in the same document, but for the first version of the objective.
            assert first[-1] != 1 or (split == "words" and pairs == "order")
        whole = window[: len(first) + len(second)]
        inside = any(one == 3 and other != 1 for one, other in itertools.pairwise(whole))
        if split == "sentences" and inside and not (pairs == "next" and told[row]):
            assert first[-1] == 3
    if split == "sentences" and pairs == "order":
        assert 0.15 * 400 < short < 0.35 * 400
    if split == "words" and pairs == "order":
        assert short == 0


@pytest.mark.processes
def test_statistics_over_20_000_samples():
    objective = MaskedLM(split="sentences", short_share=0.1)
    tokens, sizes, keys = windows_of(objective, 20_000)
    made = objective.examples(tokens, sizes, keys, LENGTHS, IDS)
    chosen = made["weights"][0] > 0
    inputs, targets = made["inputs"][0][chosen], made["targets"][0][chosen]
    counts = made["targets"][1] - 3
    assert chosen.sum() / counts.sum() == pytest.approx(0.15, abs=0.005)
    masked, kept = inputs == IDS.size - 1, inputs == targets
    shares = [masked.mean(), kept.mean(), (~masked & ~kept).mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.01)
    assert made["order"][0].mean() == pytest.approx(0.5, abs=0.01)
    # A tenth is cut to between 2 and 128 tokens, then to the end of a sentence.
    assert (counts < 120).mean() == pytest.approx(0.1 * 0.9, abs=0.01)
    assert counts[counts < 120].mean() == pytest.approx(64, abs=5)
    again = objective.examples(tokens, sizes, keys, LENGTHS, IDS)
    for name, (values, lengths) in made.items():
        np.testing.assert_array_equal(values, again[name][0])
        np.testing.assert_array_equal(lengths, again[name][1])
    # A window's example does not depend on those beside it.
    some = np.array([5, 19_999, 77])
    alone = objective.examples(tokens[some], sizes[some], keys[some], LENGTHS, IDS)
    for name, (values, _) in alone.items():
        np.testing.assert_array_equal(values, made[name][0][some])


def test_half_of_the_pairs_are_of_two_documents():
    objective = MaskedLM(split="sentences", pairs="next")
    tokens, sizes, keys = windows_of(objective, 5000)
    told = objective.examples(tokens, sizes, keys, LENGTHS, IDS)["order"][0]
    assert told.mean() == pytest.approx(0.5, abs=0.02)
    # Where no document ends, B is the text after A.
    tokens[tokens == 1] = 3
    assert not objective.examples(tokens, sizes, keys, LENGTHS, IDS)["order"][0].any()


@pytest.mark.parametrize("pairs", ["order", "next"])
def test_windows_of_any_length(pairs):
    objective = MaskedLM(split="sentences", pairs=pairs, short_share=0.5)
    tokens, _, keys = windows_of(objective, 40)
    for sizes in (np.arange(1, 41), np.full(40, 1)):
        padded = tokens * noise.within(sizes, tokens.shape[1])
        made = objective.examples(padded, sizes, keys, LENGTHS, IDS)
        assert (made["targets"][1] <= sizes + 3).all()
        assert (made["targets"][0] > 0).sum(axis=1).tolist() == made["targets"][1].tolist()


def test_settings():
    assert MaskedLM(pairs="next").window_tokens(LENGTHS) == 250
    assert MaskedLM(pairs="next").separator == "eos"
    assert MaskedLM(split="sentences").separator is None
    with pytest.raises(UserError, match="128"):
        MaskedLM(pairs="next").window_tokens(Lengths(128, 64))
    for wrong in ({"split": "lines"}, {"pairs": "both"}, {"short_share": 0.1}):
        with pytest.raises(Rejected, match=next(iter(wrong))):
            MaskedLM(**wrong)
