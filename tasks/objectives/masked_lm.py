"""BERT's objective: masked words, and the relation between two segments.

Dimensions: W windows, N tokens per window, L positions per example.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from tasks.objectives import noise
from tasks.objectives.noise import Array
from tasks.objectives.objective import Examples, Lengths, Objective
from tasks.objectives.sentences import sentence_starts
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rule, check, field, require
from tasks.vocabularies.token_ids import TokenIds
from tasks.vocabulary import sentinel_piece

# Streams of a window's key.
_SPLIT, _SWAP, _ORDER, _GRAM, _TOKEN, _SHORT, _LENGTH, _OTHER = range(21, 29)
WORDS, SENTENCES = "words", "sentences"
ORDER, NEXT = "order", "next"


class _Sample(NamedTuple):
    """Tokens of A and B in text order, word starts, number of tokens, and number of A's."""

    tokens_WN: Array
    starts_WN: Array
    lengths_W: Array
    split_W: Array

    def joined(self, begin_W: Array, lengths_W: Array, width: int) -> "_Sample":
        """Returns the sample [W, width] of `lengths` tokens, with B starting at `begin`."""
        place_WN = np.arange(width) + np.zeros_like(begin_W)[:, None]
        moved_W = begin_W - self.split_W
        from_WN = np.where(place_WN < self.split_W[:, None], place_WN, place_WN + moved_W[:, None])
        from_WN = np.minimum(from_WN, self.tokens_WN.shape[1] - 1)
        valid_WN = noise.within(lengths_W, width)
        tokens_WN = np.take_along_axis(self.tokens_WN, from_WN, axis=1) * valid_WN
        starts_WN = np.take_along_axis(self.starts_WN, from_WN, axis=1) & valid_WN
        return _Sample(tokens_WN, starts_WN, lengths_W, self.split_W)


@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
    """BERT's two tasks: predict masked whole words, and classify the relation between two segments.

    A window, or a shorter prefix of it, is split into A and B; inputs are `classify` A EOS B EOS,
    so a window is 3 tokens shorter. With `pairs` "order", B comes first with probability one half.
    With "next", B is with probability one half not the text after A but text after the next end of
    a document; a window is then twice as long. If no document ends in the rest of the window, B is
    the text after A.

    `split` "words" splits before a word, drawn uniformly; "sentences" splits before a sentence (see
    `sentence_starts`) that does not begin a document, or before a word if there is none. Then
    `short_share` of the windows are cut after the sentence that reaches a length drawn uniformly.

    A share `noise_density` of the tokens is chosen, in runs of up to `longest` words: a run has n
    words with probability proportional to 1 / n, and runs are drawn at random positions until no
    further word fits. Of 10 chosen tokens, 8 become `mask`, 1 becomes a random piece, and 1
    stays.

    Features are int32 [W, L] except the last: "inputs"; "targets", the inputs before masking;
    "weights", 1 on chosen tokens; "segments", 1 on `classify` and the first segment, 2 on the
    second; "order", int32 [W, 1], 1 if B comes first or is from another document.

    Source: Devlin et al. 2019, section 3.1 and appendix A.2; Lan et al. 2020 (arXiv:1909.11942),
    sections 3.1 and 4.1 (n-grams and sentence order); Megatron-LM, create_masked_lm_predictions
    (when to stop) and `BertDataset` (short samples).
    Differences: windows begin and end within sentences and may span documents; Megatron-LM's
    samples begin with a sentence and end with a document.
    """

    noise_density: float = 0.15
    longest: int = 3
    mask: str = sentinel_piece(0)
    classify: str = sentinel_piece(1)
    split: str = field(
        WORDS, "where A ends: before any word, or before a sentence", choices=(WORDS, SENTENCES)
    )
    pairs: str = field(
        ORDER,
        "prediction about A and B: their order (order), or whether B is the text after A (next)",
        choices=(ORDER, NEXT),
    )
    short_share: float = field(
        0.0,
        "share of windows to cut to fewer sentences; only if split is sentences",
        rule=Rule("at least 0 and at most 1", lambda value: 0 <= value <= 1),
    )
    features = ("inputs", "targets", "weights", "segments", "order")
    architectures = ("encoder",)

    def __post_init__(self) -> None:
        check(self)
        fits = not self.short_share or self.split == SENTENCES
        require(fits, "short_share", self.short_share, "0 with split 'words'")

    @property
    def separator(self) -> str | None:
        return "eos" if self.pairs == NEXT else None

    @property
    def pieces(self) -> tuple[str, ...]:
        return (self.mask, self.classify)

    def window_tokens(self, lengths: Lengths) -> int:
        if lengths.inputs < 5:
            raise UserError("masked LM needs inputs of at least 5 positions")
        if lengths.targets != lengths.inputs:
            raise UserError(
                "masked LM predicts in place: set the targets length to the inputs length, "
                f"{lengths.inputs}"
            )
        return (lengths.inputs - 3) * (2 if self.pairs == NEXT else 1)

    def sentinels(self, lengths: Lengths) -> int:
        names = [sentinel_piece(number) for number in range(1000)]
        return max([0, *(names.index(piece) + 1 for piece in self.pieces if piece in names)])

    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        starts_WN = self._word_starts(tokens_WN, lengths_W, ids)
        longest = lengths.inputs - 3
        sample, told_W = self._sample(tokens_WN, starts_WN, lengths_W, keys_W, longest, ids)
        tokens_WN, starts_WN, lengths_W, split_W = sample
        windows, width = tokens_WN.shape
        chosen_WN = self._choose(starts_WN, lengths_W, keys_W)
        mask, keys = ids.id_of(self.mask), noise.fold_in(keys_W, _TOKEN)
        masked_WN = noise.replace_tokens(
            tokens_WN, chosen_WN, keys, mask, ids.random_ids, random_share=0.1, kept_share=0.1
        )
        swapped_W = told_W & (self.pairs == ORDER)
        # Positions of the sample's tokens: A after `classify`, B after A's EOS, or B first.
        columns = np.arange(width)
        in_b_WN = columns >= split_W[:, None]
        length_b_W = lengths_W - split_W
        first_W = np.where(swapped_W, length_b_W, split_W)
        shift_WN = np.where(
            swapped_W[:, None],
            np.where(in_b_WN, 1 - split_W[:, None], length_b_W[:, None] + 2),
            np.where(in_b_WN, 2, 1),
        )
        valid_WN = noise.within(lengths_W, width)
        window, place = np.nonzero(valid_WN)
        to = (columns + shift_WN)[valid_WN]
        every = np.arange(windows)
        made = {}
        values = {"inputs": masked_WN, "targets": tokens_WN, "weights": chosen_WN}
        for name, values_WN in values.items():
            out_WL = np.zeros((windows, width + 3), np.int32)
            out_WL[window, to] = values_WN[window, place]
            if name != "weights":
                out_WL[:, 0] = ids.id_of(self.classify)
                out_WL[every, first_W + 1] = out_WL[every, lengths_W + 2] = ids.special.eos
            made[name] = out_WL, lengths_W + 3
        segments_WL = 1 + (np.arange(width + 3) > first_W[:, None] + 1)
        segments_WL *= noise.within(lengths_W + 3, width + 3)
        made["segments"] = segments_WL.astype(np.int32), lengths_W + 3
        made["order"] = told_W[:, None].astype(np.int32), np.ones(windows, np.int64)
        return made

    def _sample(
        self,
        tokens_WN: Array,
        starts_WN: Array,
        lengths_W: Array,
        keys_W: Array,
        longest: int,
        ids: TokenIds,
    ) -> tuple[_Sample, Array]:
        """Returns each window's sample, and whether B comes first or is from elsewhere."""
        told_W = noise.uniforms(noise.fold_in(keys_W, _SWAP), 1)[:, 0] < 0.5
        split_keys_W = noise.fold_in(keys_W, _SPLIT)
        if self.split == WORDS and self.pairs == ORDER:
            split_W = self._split(starts_WN, lengths_W, split_keys_W)
            return _Sample(tokens_WN, starts_WN, lengths_W, split_W), told_W
        width, sizes_W = tokens_WN.shape[1], np.minimum(lengths_W, longest)
        inner_WN = starts_WN
        if self.split == SENTENCES:
            inner_WN = sentence_starts(tokens_WN, lengths_W, ids)
            sizes_W = self._shortened(inner_WN, sizes_W, longest, keys_W)
        ends_WN = ids.text_ids[tokens_WN] == ids.special.eos
        within_WN = noise.within(sizes_W, width)
        usable_WN = inner_WN & within_WN
        usable_WN[:, 1:] &= ~ends_WN[:, :-1]
        alone_W = np.count_nonzero(usable_WN, axis=1) < 2
        usable_WN[alone_W] = (starts_WN & within_WN)[alone_W]
        split_W = self._split(usable_WN, sizes_W, split_keys_W)
        whole = _Sample(tokens_WN, starts_WN, sizes_W, split_W)
        if self.pairs == ORDER:
            return whole.joined(split_W, sizes_W, longest), told_W
        # If B is from elsewhere, it begins after the end of a document that A does not reach.
        place_N = np.arange(width)
        others_WN = np.zeros_like(ends_WN)
        ends_WN &= place_N >= split_W[:, None]
        others_WN[:, 1:] = np.logical_or.accumulate(ends_WN, axis=1)[:, :-1]
        others_WN &= inner_WN
        counts_W = np.count_nonzero(others_WN, axis=1)
        told_W &= counts_W > 0
        rank_W = noise.integers(noise.fold_in(keys_W, _OTHER), 0, np.maximum(counts_W, 1) - 1)
        place_W = np.argmax(np.cumsum(others_WN, axis=1) > rank_W[:, None], axis=1)
        begin_W = np.where(told_W, place_W, split_W)
        sizes_W = split_W + np.minimum(sizes_W - split_W, lengths_W - begin_W)
        return whole.joined(begin_W, sizes_W, longest), told_W

    def _shortened(
        self, sentences_WN: Array, lengths_W: Array, longest: int, keys_W: Array
    ) -> Array:
        """Returns window lengths after some windows are cut, int64 [W].

        A cut window keeps as many sentences, at least two, as reach a length drawn from 2 to
        `longest` + 3.
        """
        short_W = noise.uniforms(noise.fold_in(keys_W, _SHORT), 1)[:, 0] < self.short_share
        target_W = noise.integers(noise.fold_in(keys_W, _LENGTH), 2, longest + 3)
        place_N = np.arange(sentences_WN.shape[1])
        number_WN = np.cumsum(sentences_WN, axis=1)
        enough_WN = sentences_WN & (place_N >= target_W[:, None]) & (number_WN > 2)
        ends_W = np.where(enough_WN.any(axis=1), np.argmax(enough_WN, axis=1), lengths_W)
        return np.where(short_W, np.minimum(ends_W, lengths_W), lengths_W)

    def _word_starts(self, tokens_WN: Array, lengths_W: Array, ids: TokenIds) -> Array:
        starts_WN = ids.word_starts[tokens_WN]
        starts_WN[:, 0] = True  # a word cut by the window's start counts as a word
        starts_WN[:, 1:] |= tokens_WN[:, :-1] == ids.special.eos
        return starts_WN & noise.within(lengths_W, tokens_WN.shape[1])

    def _split(self, starts_WN: Array, lengths_W: Array, keys_W: Array) -> Array:
        """Returns the start of a uniformly drawn word other than the first, int64 [W].

        For a window of one word, returns its end.
        """
        counts_W = np.count_nonzero(starts_WN, axis=1)
        rank_W = noise.integers(keys_W, np.minimum(1, counts_W - 1), counts_W - 1)
        place_W = np.argmax(np.cumsum(starts_WN, axis=1) > rank_W[:, None], axis=1)
        return np.where(counts_W > 1, place_W, lengths_W)

    def _choose(self, starts_WN: Array, lengths_W: Array, keys_W: Array) -> Array:
        """Returns the tokens to predict, bool [W, N]."""
        windows, width = starts_WN.shape
        counts_W = np.count_nonzero(starts_WN, axis=1)
        words = int(counts_W.max(initial=0))
        # The first token of each word and, after the last word, the window's end.
        begin_WV = np.repeat(lengths_W[:, None], words + self.longest + 1, axis=1)
        begin_WV[noise.within(counts_W, begin_WV.shape[1])] = np.nonzero(starts_WN)[1]
        draws_WV = noise.uniforms(noise.fold_in(keys_W, _ORDER), words)
        draws_WV = np.where(noise.within(counts_W, words), draws_WV, 2.0)
        order_WV = np.argsort(draws_WV, axis=1, kind="stable")
        grams_WV = self._grams(keys_W, words)
        left_W = np.maximum(np.rint(lengths_W * self.noise_density).astype(np.int64), 1)
        taken_WV = np.zeros((windows, words + self.longest), bool)
        open_windows = np.arange(windows)
        for turn in range(words):
            open_windows = open_windows[
                (left_W[open_windows] > 0) & (counts_W[open_windows] > turn)
            ]
            if not len(open_windows):
                break
            word = order_WV[open_windows, turn]
            gram = np.minimum(grams_WV[open_windows, turn], counts_W[open_windows] - word)
            size = np.zeros(len(word), np.int64)
            # If a run exceeds the tokens left, try it with fewer words.
            for fewer in range(self.longest):
                tried = np.maximum(gram - fewer, 1)
                tokens = begin_WV[open_windows, word + tried] - begin_WV[open_windows, word]
                size = np.where((size == 0) & (tokens <= left_W[open_windows]), tried, size)
            reach = np.arange(self.longest) < size[:, None]
            cells = word[:, None] + np.arange(self.longest)
            free = ~(taken_WV[open_windows[:, None], cells] & reach).any(axis=1) & (size > 0)
            at, cells, reach = open_windows[free], cells[free], reach[free]
            taken_WV[np.broadcast_to(at[:, None], cells.shape)[reach], cells[reach]] = True
            word, size = word[free], size[free]
            left_W[at] -= begin_WV[at, word + size] - begin_WV[at, word]
        number_WN = np.maximum(np.cumsum(starts_WN, axis=1) - 1, 0)
        chosen_WN = np.take_along_axis(taken_WV, number_WN, axis=1)
        return chosen_WN & noise.within(lengths_W, width)

    def _grams(self, keys_W: Array, words: int) -> Array:
        """Returns the number of words in the run that may begin at each word, int64 [W, words]."""
        shares = np.cumsum(1 / np.arange(1, self.longest + 1))
        draws_WV = noise.uniforms(noise.fold_in(keys_W, _GRAM), words)
        return 1 + np.searchsorted(shares[:-1] / shares[-1], draws_WV, "right")
