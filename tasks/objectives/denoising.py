"""Objectives: how many tokens a window has, and the features made from it.

An objective is frozen plain data with a few questions to ask it; `examples` is vectorised over a
batch of windows and pure in (tokens, keys). Denoising is T5's matrix: a mask, what inputs make of
it, and what targets make of it; `DENOISING` has the rows of the T5 paper by name.

Dimensions: W windows, N tokens of a window.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from tasks.objectives import noise
from tasks.terminal.command_line import UserError, nearest
from tasks.vocabulary import EOS_ID, TokenIds

# Feature -> (int32 [W, any] padded with 0, lengths int64 [W]).
Examples = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Positions of an example's features, EOS included; `inputs` is 0 where there are none."""

    inputs: int
    targets: int


class Objective(Protocol):
    """What pipeline, trainer and seqio ask of an objective.

    Attributes:
      features: what an example consists of. "inputs" and "targets" are ids. "weights" (0 or 1 a
        target) says where the loss is, on all targets if it is not there. "prefix" is 1 where a
        decoder sees in both directions. "segments" and "order" are those of `MaskedLM`.
      pieces: pieces that the vocabulary must have, by their text.
      separator: what must end documents in the cache ("none" or "eos"); None if either will do.
    """

    @property
    def features(self) -> tuple[str, ...]: ...

    @property
    def pieces(self) -> tuple[str, ...]: ...

    @property
    def separator(self) -> str | None: ...

    def window_tokens(self, lengths: Lengths) -> int:
        """Tokens of the corpus that one example takes.

        Raises:
          UserError: the lengths cannot hold such examples; says which would.
        """

    def sentinels(self, lengths: Lengths) -> int:
        """Most sentinels that one example takes."""

    def examples(
        self,
        tokens_WN: np.ndarray,
        lengths_W: np.ndarray,
        keys_W: np.ndarray,
        lengths: Lengths,
        ids: TokenIds,
    ) -> Examples:
        """Returns feature -> (int32 [W, any] padded with 0, lengths int64 [W]).

        Args:
          tokens_WN: int32 [W, N] windows of at most `window_tokens`, padded with 0.
          lengths_W: int64 [W] their lengths.
          keys_W: uint64 [W] noise keys.
          lengths: those that the window was planned with.
          ids: the vocabulary; sentinels are its last ids, descending.
        """


@functools.cache
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


class Bounds(NamedTuple):
    """What a mask may be in a window: fewest and most noise tokens, most spans, and the most that
    tokens and spans come to together."""

    fewest: int
    tokens: int
    spans: int
    tokens_and_spans: int


class Mask(Protocol):
    """Chooses noise. `certain` says whether `bounds` hold for every window."""

    @property
    def certain(self) -> bool: ...

    def draw(self, keys_W: np.ndarray, lengths_W: np.ndarray, width: int) -> np.ndarray:
        """Returns bool [W, width]."""

    def bounds(self, raw: int) -> Bounds:
        """Of a window of `raw` tokens."""


@dataclasses.dataclass(frozen=True)
class RandomSpans:
    """Spans of random lengths, as many as `noise.span_counts` says; see `noise.span_mask`."""

    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0
    certain = True

    def draw(self, keys_W, lengths_W, width):
        return noise.span_mask(
            keys_W, lengths_W, width, self.noise_density, self.mean_noise_span_length
        )

    def bounds(self, raw):
        counts = noise.span_counts(np.array([raw]), self.noise_density, self.mean_noise_span_length)
        tokens, spans = (int(count[0]) for count in counts)
        return Bounds(tokens, tokens, spans, tokens + spans)


@dataclasses.dataclass(frozen=True)
class RegularSpans:
    """Spans of one length, at one distance; see `noise.regular_mask`."""

    noise_density: float = 0.15
    shortest: int = 3
    longest: int = 3
    certain = True

    def draw(self, keys_W, lengths_W, width):
        return noise.regular_mask(
            keys_W, lengths_W, width, self.noise_density, self.shortest, self.longest
        )

    def bounds(self, raw):
        tokens, spans, both = [], [], []
        for length in range(self.shortest, self.longest + 1):
            period = int(noise.regular_period(length, self.noise_density))
            offset = np.arange(period)[:, None]
            mask = (np.arange(raw) + offset) % period < length
            tokens.append(mask.sum(axis=1))
            spans.append(noise.run_starts(mask).sum(axis=1))
            both.append(tokens[-1] + spans[-1])
        return Bounds(
            min(int(each.min()) for each in tokens),
            *(max(int(each.max()) for each in several) for several in (tokens, spans, both)),
        )


# Masks of independent tokens are planned for so many standard deviations above the mean. One
# window in 700 has more noise than that; its noise ends where the targets are full.
_DEVIATIONS = 3


@dataclasses.dataclass(frozen=True)
class IidTokens:
    """Each token on its own; see `noise.iid_mask`."""

    noise_density: float = 0.15
    certain = False

    def draw(self, keys_W, lengths_W, width):
        return noise.iid_mask(keys_W, lengths_W, width, self.noise_density)

    def bounds(self, raw):
        # With x of a token 1 where it is noise and x' that of the token before, 0 before the first:
        # sums of x, of beginnings of spans x (1 - x'), and of both, x (2 - x').
        d = self.noise_density
        start = d * (1 - d)
        tokens = _most(raw * d, raw * start, raw)
        spans = _most((raw - 1) * start + d, raw * start * (1 - 3 * start), (raw + 1) // 2)
        mean = d * (2 - d)
        variance = d * (4 - 3 * d) - mean**2 + 2 * (d * mean - mean**2)
        both = _most((raw - 1) * mean + 2 * d, raw * variance, raw + (raw + 1) // 2)
        return Bounds(0, tokens, spans, both)


def _most(mean: float, variance: float, possible: int) -> int:
    return min(possible, math.ceil(mean + _DEVIATIONS * math.sqrt(max(variance, 0.0))))


@dataclasses.dataclass(frozen=True)
class RandomPrefix:
    """A prefix of random length counts as noise; see `noise.prefix_mask`."""

    noise_density: float = 0.5
    certain = True

    def draw(self, keys_W, lengths_W, width):
        return noise.prefix_mask(keys_W, lengths_W, width, self.noise_density)

    def bounds(self, raw):
        fewest = int(noise.shortest_prefix(np.array([raw]), self.noise_density)[0])
        return Bounds(fewest, raw - 1, 1, raw)


class _Side(NamedTuple):
    """What becomes of a window on one side of an example.

    `make`: (tokens_WN, mask_WN, lengths_W, keys_W, ids) -> (tokens, lengths). `tokens`: the most
    that it makes of a window of so many tokens. `sentinels`: the most it takes.
    """

    make: Callable[..., tuple[np.ndarray, np.ndarray]]
    tokens: Callable[[int, Bounds], int]
    sentinels: Callable[[Bounds], int]


def _replaced(random_share: float, kept_share: float) -> _Side:
    def make(tokens_WN, mask_WN, lengths_W, keys_W, ids):
        replaced_WN = noise.replace_tokens(
            tokens_WN, mask_WN, keys_W, ids.size - 1, ids.first_sentinel, random_share, kept_share
        )
        return replaced_WN, lengths_W

    return _Side(make, lambda raw, bounds: raw, lambda bounds: 1)


def _closing(bounds: Bounds) -> int:
    """1 if text may follow the last span, where T5's targets then have one more sentinel."""
    return int(bounds.fewest != bounds.tokens)


# T5's functions of a noise mask, by T5's names; "all" is the window itself (T5: targets_fn = None),
# and the last number of the third name says which share of tokens stays, as in BERT.
# Source: T5 `data/preprocessors.py`; Raffel et al. 2020, sections 3.3.1 and 3.3.2.
SIDES: Mapping[str, _Side] = MappingProxyType(
    {
        "noise_token_to_sentinel": _replaced(0.0, 0.0),
        "noise_token_to_random_token_or_sentinel": _replaced(0.1, 0.0),
        "noise_token_to_random_token_or_sentinel_or_itself": _replaced(0.1, 0.1),
        "noise_span_to_unique_sentinel": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.substitute_spans(
                tokens, mask, lengths, ids.size - 1
            ),
            lambda raw, bounds: raw,
            lambda bounds: bounds.spans,
        ),
        "nonnoise_span_to_unique_sentinel": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.substitute_spans(
                tokens, ~mask, lengths, ids.size - 1
            ),
            lambda raw, bounds: bounds.tokens_and_spans + _closing(bounds),
            lambda bounds: bounds.spans + _closing(bounds),
        ),
        "noise_span_to_sentinel": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.substitute_spans(
                tokens, mask, lengths, ids.size - 1, unique=False
            ),
            lambda raw, bounds: raw,
            lambda bounds: 1,
        ),
        "nonnoise_span_to_sentinel": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.substitute_spans(
                tokens, ~mask, lengths, ids.size - 1, unique=False
            ),
            lambda raw, bounds: bounds.tokens_and_spans + _closing(bounds),
            lambda bounds: 1,
        ),
        "drop_noise_tokens": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.compress(
                tokens, ~mask & noise.within(lengths, mask.shape[1])
            ),
            lambda raw, bounds: raw - bounds.fewest,
            lambda bounds: 0,
        ),
        "drop_nonnoise_tokens": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.compress(tokens, mask),
            lambda raw, bounds: bounds.tokens,
            lambda bounds: 0,
        ),
        "permute_noise_tokens": _Side(
            lambda tokens, mask, lengths, keys, ids: (noise.permute(tokens, mask, keys), lengths),
            lambda raw, bounds: raw,
            lambda bounds: 0,
        ),
        "all": _Side(
            lambda tokens, mask, lengths, keys, ids: (tokens, lengths),
            lambda raw, bounds: raw,
            lambda bounds: 0,
        ),
    }
)


def with_eos(tokens_WN: np.ndarray, lengths_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens int32 [W, N + 1], lengths + 1), an EOS after each."""
    out_WN = np.zeros((tokens_WN.shape[0], tokens_WN.shape[1] + 1), np.int32)
    out_WN[:, :-1] = tokens_WN
    out_WN[np.arange(len(out_WN)), lengths_W] = EOS_ID
    return out_WN, lengths_W + 1


@dataclasses.dataclass(frozen=True)
class Denoising:
    """A window under a noise mask: `inputs` and `targets` name what SIDES makes of it.

    A window is as long as random spans with one sentinel each need to fill the inputs, and one
    token shorter than the inputs under other masks.

    Source: T5 `data/preprocessors.py`, denoise; Raffel et al. 2020, section 3.3.
    Differences: where independent tokens of noise make too much for the targets or take too many
    sentinels, T5 cuts the targets and takes pieces for sentinels; here the noise ends earlier.

    Raises:
      ValueError: at construction, if a side is not one of SIDES.
    """

    mask: Mask = RandomSpans()
    inputs: str = "noise_span_to_unique_sentinel"
    targets: str = "nonnoise_span_to_unique_sentinel"
    features = ("inputs", "targets")
    pieces = ()
    separator = None

    def __post_init__(self) -> None:
        for side in (self.inputs, self.targets):
            if side not in SIDES:
                raise ValueError(f"unknown side {side!r}{nearest(side, SIDES)}")

    def window_tokens(self, lengths):
        raw = self._raw(lengths.inputs)
        if lengths.inputs < 4 or raw < 2:
            raise UserError(f"inputs length {lengths.inputs} is too short for denoising")
        needed = SIDES[self.targets].tokens(raw, self.mask.bounds(raw)) + 1
        if needed > lengths.targets:
            raise UserError(
                f"denoising of inputs length {lengths.inputs} makes targets of up to {needed} "
                f"tokens, and the targets length is {lengths.targets}: set it to {needed} or more"
            )
        return raw

    def _raw(self, inputs_length: int) -> int:
        if not isinstance(self.mask, RandomSpans) or self.inputs != "noise_span_to_unique_sentinel":
            return inputs_length - 1
        raw, _ = span_corruption_lengths(
            inputs_length, self.mask.noise_density, self.mask.mean_noise_span_length
        )
        # T5 plans no span where there is less noise than half a span, and draws one: it would cut.
        while raw > 1:
            bounds = self.mask.bounds(raw)
            if raw - bounds.tokens + bounds.spans + 1 <= inputs_length:
                break
            raw -= 1
        return raw

    def fitting(self, inputs_length: int) -> Lengths:
        """Returns `inputs_length` with the shortest targets length that goes with it."""
        raw = self.window_tokens(Lengths(inputs_length, 1 << 62))
        needed = SIDES[self.targets].tokens(raw, self.mask.bounds(raw)) + 1
        return Lengths(inputs_length, needed)

    def sentinels(self, lengths):
        bounds = self.mask.bounds(self.window_tokens(lengths))
        return max(SIDES[side].sentinels(bounds) for side in (self.inputs, self.targets))

    def examples(self, tokens_WN, lengths_W, keys_W, lengths, ids):
        mask_WN = self.mask.draw(keys_W, lengths_W, tokens_WN.shape[1])
        if not self.mask.certain:
            mask_WN = self._limited(mask_WN, lengths, ids)
        keys_W = noise.fold_in(keys_W, 2)
        return {
            name: with_eos(*SIDES[side].make(tokens_WN, mask_WN, lengths_W, keys_W, ids))
            for name, side in (("inputs", self.inputs), ("targets", self.targets))
        }

    def _limited(self, mask_WN: np.ndarray, lengths: Lengths, ids: TokenIds) -> np.ndarray:
        # One position is EOS's and one, with one sentinel, that of text after the last span.
        if self.targets == "nonnoise_span_to_unique_sentinel":
            return noise.limit_noise(mask_WN, 1, 1, lengths.targets - 2, ids.sentinels - 1)
        if self.targets == "nonnoise_span_to_sentinel":
            return noise.limit_noise(mask_WN, 1, 1, lengths.targets - 2, mask_WN.shape[1])
        if self.targets == "drop_nonnoise_tokens":
            return noise.limit_noise(mask_WN, 1, 0, lengths.targets - 1, mask_WN.shape[1])
        return mask_WN


def span_corruption(noise_density: float = 0.15, mean_noise_span_length: float = 3.0) -> Denoising:
    """T5's span corruption. Source: Raffel et al. 2020, section 3.1.4."""
    return Denoising(RandomSpans(noise_density, mean_noise_span_length))


def prefix_lm(noise_density: float = 0.5) -> Denoising:
    """A prefix of random length as inputs, the rest of the window as targets.

    Source: Raffel et al. 2020, section 3.2.3; T5 `data/preprocessors.py`, prefix_lm.
    """
    return Denoising(RandomPrefix(noise_density), "drop_nonnoise_tokens", "drop_noise_tokens")


# The objectives that the T5 paper compares, by the names of its experiments: u unique sentinels,
# d dropped, m a mask token, r random tokens, s sentinels, k kept, f the full text; numbers are
# span lengths and percentages.
# Source: Raffel et al. 2020, tables 3 to 7, and the operative configurations of its experiments.
DENOISING: Mapping[str, Denoising] = MappingProxyType(
    {
        "iid_10_u_u": Denoising(IidTokens(0.10)),
        "iid_15_u_u": Denoising(IidTokens(0.15)),
        "iid_25_u_u": Denoising(IidTokens(0.25)),
        "iid_50_u_u": Denoising(IidTokens(0.50)),
        "iid_15_d_d": Denoising(IidTokens(), "drop_noise_tokens", "drop_nonnoise_tokens"),
        "iid_15_m_f": Denoising(IidTokens(), "noise_token_to_sentinel", "all"),
        "iid_15_r10s90_f": Denoising(IidTokens(), "noise_token_to_random_token_or_sentinel", "all"),
        "iid_15_r10k10s80_f": Denoising(
            IidTokens(), "noise_token_to_random_token_or_sentinel_or_itself", "all"
        ),
        "span_2_15_u_u": span_corruption(0.15, 2.0),
        "span_3_15_u_u": span_corruption(0.15, 3.0),
        "span_5_15_u_u": span_corruption(0.15, 5.0),
        "span_10_15_u_u": span_corruption(0.15, 10.0),
        "regular_3_15_u_u": Denoising(RegularSpans(0.15, 3, 3)),
        "regular_1_5_15_u_u": Denoising(RegularSpans(0.15, 1, 5)),
        "deshuffling": Denoising(IidTokens(1.0), "permute_noise_tokens", "all"),
    }
)


@dataclasses.dataclass(frozen=True)
class AutoregressiveLM:
    """The window as targets, no inputs.

    With `eos` "window" an EOS ends every window, T5's `lm`; with "document" the EOS are those that
    the cache has after documents, T5's `full_lm`. The two losses do not compare: the place of a
    window's EOS is no surprise.

    Source: T5 `data/preprocessors.py`, lm and full_lm.
    """

    eos: str = "window"
    features = ("targets",)
    pieces = ()

    def __post_init__(self) -> None:
        if self.eos not in ("window", "document"):
            raise ValueError(f"AutoregressiveLM.eos is {self.eos!r}; it is 'window' or 'document'")

    @property
    def separator(self):
        return "eos" if self.eos == "document" else None

    def window_tokens(self, lengths):
        if lengths.targets < 2:
            raise UserError("an autoregressive LM needs targets of at least 2 positions")
        return lengths.targets - (self.eos == "window")

    def sentinels(self, lengths):
        return 0

    def examples(self, tokens_WN, lengths_W, keys_W, lengths, ids):
        if self.eos == "window":
            return {"targets": with_eos(tokens_WN, lengths_W)}
        return {"targets": (tokens_WN, lengths_W)}


@dataclasses.dataclass(frozen=True)
class DecoderPrefixLM:
    """Prefix LM for a decoder alone: the window whole, seen in both directions up to a uniform
    place and learned from there on; no EOS between.

    Feature "prefix" is 1 on the prefix and one position more, the one whose input is the prefix's
    last token.

    Source: Raffel et al. 2020, section 3.2.3; T5 `data/preprocessors.py`,
    pack_prefix_lm_decoder_only.
    """

    features = ("targets", "weights", "prefix")
    pieces = ()
    separator = None

    def window_tokens(self, lengths):
        if lengths.targets < 2:
            raise UserError("a prefix LM needs targets of at least 2 positions")
        return lengths.targets

    def sentinels(self, lengths):
        return 0

    def examples(self, tokens_WN, lengths_W, keys_W, lengths, ids):
        width = tokens_WN.shape[1]
        prefix_WN = noise.prefix_mask(keys_W, lengths_W, width)
        place_W = np.count_nonzero(prefix_WN, axis=1)
        weights_WN = noise.within(lengths_W, width) & ~prefix_WN
        return {
            "targets": (tokens_WN, lengths_W),
            "weights": (weights_WN.astype(np.int32), lengths_W),
            "prefix": (noise.within(place_W + 1, width).astype(np.int32), place_W + 1),
        }
