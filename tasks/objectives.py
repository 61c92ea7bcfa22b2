"""Objectives: how many tokens a window has, and the inputs and targets made from it.

An objective is frozen plain data with four questions to ask it; `examples` is vectorised over a
batch of windows. Both sides end in EOS. Dimensions: W windows, N tokens of a window.
"""

import dataclasses
from typing import Protocol

import numpy as np

from tasks import noise
from tasks.command_line import UserError
from tasks.vocabulary import EOS_ID


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Positions of an example's features, EOS included; `inputs` is 0 where there are none."""

    inputs: int
    targets: int


class Objective(Protocol):
    """What pipeline and trainer ask of an objective."""

    def window_tokens(self, lengths: Lengths) -> int:
        """Tokens of the corpus that one example takes.

        Raises:
          UserError: the lengths cannot hold such examples; says which would.
        """

    def sentinels(self, lengths: Lengths) -> int:
        """Most sentinels that one example takes."""

    def examples(
        self, tokens_WN: np.ndarray, lengths_W: np.ndarray, keys_W: np.ndarray, vocabulary_size: int
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns feature -> (int32 [W, any] padded with 0, lengths int64 [W]), EOS included.

        Args:
          tokens_WN: int32 [W, N] windows, padded with 0.
          lengths_W: int64 [W] their lengths.
          keys_W: uint64 [W] noise keys.
          vocabulary_size: the sentinels are the ids below it, descending.
        """


def span_corruption_lengths(
    inputs_length: int, noise_density: float = 0.15, mean_noise_span_length: float = 3.0
) -> tuple[int, int]:
    """Returns (raw tokens, targets length) that exactly fill `inputs_length`: 512 -> (568, 114).

    Source: T5 `data/preprocessors.py`, random_spans_helper, with one sentinel a span and EOS on
    both sides; rounding is Python's (half to even, float64).
    """

    def filled(raw: int) -> tuple[int, int]:
        corrupted = round(raw * noise_density)
        spans = round(corrupted / mean_noise_span_length)
        return raw - corrupted + spans + 1, corrupted + spans + 1

    raw = inputs_length - 1
    while filled(raw + 1)[0] <= inputs_length:
        raw += 1
    targets = filled(raw)[1]
    if noise_density == 0.5 and targets > inputs_length:
        raw, targets = raw - 1, targets - 1
    return raw, targets


def _with_eos(tokens_WN: np.ndarray, lengths_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((tokens_WN.shape[0], tokens_WN.shape[1] + 1), np.int32)
    out[:, :-1] = tokens_WN
    out[np.arange(len(out)), lengths_W] = EOS_ID
    return out, lengths_W + 1


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """T5's span corruption. Source: Raffel et al. 2020, section 3.1.4."""

    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0

    def window_tokens(self, lengths: Lengths) -> int:
        raw, targets = span_corruption_lengths(
            lengths.inputs, self.noise_density, self.mean_noise_span_length
        )
        if lengths.inputs < 4 or raw < 2:
            raise UserError(f"inputs length {lengths.inputs} is too short for span corruption")
        if targets > lengths.targets:
            raise UserError(
                f"span corruption of inputs length {lengths.inputs} makes targets of {targets} "
                f"tokens, and the targets length is {lengths.targets}: set it to {targets} or more"
            )
        return raw

    def sentinels(self, lengths: Lengths) -> int:
        raw = self.window_tokens(lengths)
        _, spans = noise.span_counts(
            np.array([raw]), self.noise_density, self.mean_noise_span_length
        )
        return int(spans[0])

    def examples(self, tokens_WN, lengths_W, keys_W, vocabulary_size):
        mask_WN = noise.span_mask(
            keys_W,
            lengths_W,
            tokens_WN.shape[1],
            self.noise_density,
            self.mean_noise_span_length,
        )
        sides = {"inputs": mask_WN, "targets": ~mask_WN}
        return {
            name: _with_eos(
                *noise.substitute_spans(tokens_WN, side_WN, lengths_W, vocabulary_size - 1)
            )
            for name, side_WN in sides.items()
        }


@dataclasses.dataclass(frozen=True)
class PrefixLM:
    """A prefix of uniform length as inputs, the rest of the window as targets.

    Source: Raffel et al. 2020, section 3.2.3; T5 `data/preprocessors.py`, prefix_lm with
    random_prefix_noise_mask at density 0.5: of L tokens, 1 to L - 1 are the prefix.
    """

    def window_tokens(self, lengths: Lengths) -> int:
        if min(lengths.inputs, lengths.targets) < 3:
            raise UserError("prefix LM needs inputs and targets of at least 3 positions")
        if lengths.targets < lengths.inputs:
            raise UserError(
                f"prefix LM splits {lengths.inputs - 1} tokens anywhere, so targets need as many "
                f"positions as inputs: set the targets length to {lengths.inputs}"
            )
        return lengths.inputs - 1

    def sentinels(self, lengths: Lengths) -> int:
        return 0

    def examples(self, tokens_WN, lengths_W, keys_W, vocabulary_size):
        longest_W = np.maximum(lengths_W - 1, 0)
        shortest_W = np.minimum(longest_W, 1)
        draw_W = noise.uniforms(keys_W, 1)[:, 0]
        choices_W = longest_W - shortest_W + 1
        prefix_W = shortest_W + (draw_W * choices_W).astype(np.int64)
        columns = np.arange(tokens_WN.shape[1])
        prefix_WN = columns < prefix_W[:, None]
        rest_WN = ~prefix_WN & (columns < lengths_W[:, None])
        return {
            name: _with_eos(*noise.compress(tokens_WN, keep_WN))
            for name, keep_WN in {"inputs": prefix_WN, "targets": rest_WN}.items()
        }


@dataclasses.dataclass(frozen=True)
class AutoregressiveLM:
    """The window and an EOS as targets, no inputs. Source: T5 `data/preprocessors.py`, lm."""

    def window_tokens(self, lengths: Lengths) -> int:
        if lengths.targets < 2:
            raise UserError("an autoregressive LM needs targets of at least 2 positions")
        return lengths.targets - 1

    def sentinels(self, lengths: Lengths) -> int:
        return 0

    def examples(self, tokens_WN, lengths_W, keys_W, vocabulary_size):
        return {"targets": _with_eos(tokens_WN, lengths_W)}
