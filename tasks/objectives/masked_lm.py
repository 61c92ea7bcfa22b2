"""BERT's objective: masked words and the order of two segments.

Dimensions: W windows, N tokens of a window, L positions of an example.
"""

import dataclasses

import numpy as np

from tasks.objectives import noise
from tasks.objectives.objective import Objective
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, sentinel_piece

_SPLIT, _SWAP, _ORDER, _GRAM, _TOKEN = 21, 22, 23, 24, 25  # streams of a window's key


@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
    """BERT's two tasks: predict masked whole words, and tell which of two segments came first.

    A window is split into A and B at the beginning of a word, drawn uniformly; with probability one
    half B comes first. Inputs are `classify` A EOS B EOS, so a window is 3 tokens shorter. A share
    `noise_density` of its tokens is chosen, in runs of up to `longest` words: a run has n words
    with probability proportional to 1 / n, and runs are drawn at random positions until no further
    word fits. Of the chosen tokens 8 in 10 become `mask`, 1 becomes a random piece, and 1 stays.

    Features are int32 [W, L] except the last: "inputs"; "targets", the inputs before masking;
    "weights", 1 on chosen tokens; "segments", 1 on `classify` and the first segment, 2 on the
    second; "order", int32 [W, 1], 1 if B comes first.

    Source: Devlin et al. 2019, section 3.1; Lan et al. 2020 (arXiv:1909.11942), sections 3.1 and
    4.1, n-grams and sentence order; Megatron-LM, create_masked_lm_predictions, when to stop.
    Differences: rows of a cache do not mark sentences, so segments are cut at words.
    """

    noise_density: float = 0.15
    longest: int = 3
    mask: str = sentinel_piece(0)
    classify: str = sentinel_piece(1)
    features = ("inputs", "targets", "weights", "segments", "order")
    architectures = ("encoder",)

    @property
    def pieces(self):
        return (self.mask, self.classify)

    def window_tokens(self, lengths):
        if lengths.inputs < 5:
            raise UserError("masked LM needs inputs of at least 5 positions")
        if lengths.targets != lengths.inputs:
            raise UserError(
                "masked LM predicts in place: set the targets length to that of the inputs, "
                f"{lengths.inputs}"
            )
        return lengths.inputs - 3

    def sentinels(self, lengths):
        names = [sentinel_piece(number) for number in range(1000)]
        return max([0, *(names.index(piece) + 1 for piece in self.pieces if piece in names)])

    def examples(self, tokens_WN, lengths_W, keys_W, lengths, ids):
        windows, width = tokens_WN.shape
        starts_WN = self._word_starts(tokens_WN, lengths_W, ids)
        chosen_WN = self._choose(starts_WN, lengths_W, keys_W)
        masked_WN = noise.replace_tokens(
            tokens_WN,
            chosen_WN,
            noise.fold_in(keys_W, _TOKEN),
            ids.id_of(self.mask),
            ids.first_sentinel,
            random_share=0.1,
            kept_share=0.1,
        )
        split_W = self._split(starts_WN, lengths_W, noise.fold_in(keys_W, _SPLIT))
        swapped_W = noise.uniforms(noise.fold_in(keys_W, _SWAP), 1)[:, 0] < 0.5
        # Positions of the window's tokens: A after `classify`, B after A's EOS, or B first.
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
        for name, values_WN, special in (
            ("inputs", masked_WN, True),
            ("targets", tokens_WN, True),
            ("weights", chosen_WN, False),
        ):
            out_WL = np.zeros((windows, width + 3), np.int32)
            out_WL[window, to] = values_WN[window, place]
            if special:
                out_WL[:, 0] = ids.id_of(self.classify)
                out_WL[every, first_W + 1] = out_WL[every, lengths_W + 2] = EOS_ID
            made[name] = out_WL, lengths_W + 3
        positions = np.arange(width + 3)
        second_WL = positions > first_W[:, None] + 1
        segments_WL = 1 + second_WL
        segments_WL *= noise.within(lengths_W + 3, width + 3)
        made["segments"] = segments_WL.astype(np.int32), lengths_W + 3
        made["order"] = swapped_W[:, None].astype(np.int32), np.ones(windows, np.int64)
        return made

    def _word_starts(self, tokens_WN, lengths_W, ids) -> np.ndarray:
        starts_WN = ids.word_starts[tokens_WN]
        starts_WN[:, 0] = True  # the end of a word that the window cuts counts as a word
        starts_WN[:, 1:] |= tokens_WN[:, :-1] == EOS_ID
        return starts_WN & noise.within(lengths_W, tokens_WN.shape[1])

    def _split(self, starts_WN, lengths_W, keys_W) -> np.ndarray:
        """Returns the beginning of a word other than the first, drawn uniformly, int64 [W]; the end
        of a window that is one word."""
        counts_W = np.count_nonzero(starts_WN, axis=1)
        rank_W = noise.integers(keys_W, np.minimum(1, counts_W - 1), counts_W - 1)
        place_W = np.argmax(np.cumsum(starts_WN, axis=1) > rank_W[:, None], axis=1)
        return np.where(counts_W > 1, place_W, lengths_W)

    def _choose(self, starts_WN, lengths_W, keys_W) -> np.ndarray:
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
        shares = np.cumsum(1 / np.arange(1, self.longest + 1))
        grams_WV = 1 + np.searchsorted(
            shares[:-1] / shares[-1], noise.uniforms(noise.fold_in(keys_W, _GRAM), words), "right"
        )
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
            # A run that exceeds the tokens left is tried with fewer words.
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
