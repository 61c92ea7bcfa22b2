"""Noise masks as plain data: which tokens of a window are noise, and bounds on their number.

Dimensions: W windows, N tokens per window.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol

import numpy as np

from tasks.objectives import noise
from tasks.objectives.noise import Array
from tasks.terminal.flag_fields import Checked, Rule, above, at_least, check, field, require


class Bounds(NamedTuple):
    """Bounds on the numbers of noise tokens, noise spans, and both in one window."""

    fewest: int
    tokens: int
    spans: int
    tokens_and_spans: int


# If all tokens were in spans, no window would fill the inputs.
_SHARE = Rule("between 0 and 1", lambda value: 0 < value < 1)
_SHARE_OR_ALL = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)


class Mask(Protocol):
    """Chooses the noise tokens of a window.

    `certain` is False if a window may exceed `bounds`.
    """

    @property
    def certain(self) -> bool: ...

    def draw(self, keys_W: Array, lengths_W: Array, width: int) -> Array:
        """Returns bool [W, width], True on noise."""

    def bounds(self, raw: int) -> Bounds:
        """Returns the bounds on the mask in a window of `raw` tokens."""


@dataclasses.dataclass(frozen=True)
class RandomSpans(Checked):
    """Spans of random lengths; see `noise.span_mask` and `noise.span_counts`."""

    noise_density: float = field(0.15, "share of noise", rule=_SHARE)
    mean_noise_span_length: float = field(3.0, "mean tokens per span", rule=above(0))
    certain = True

    def draw(self, keys_W: Array, lengths_W: Array, width: int) -> Array:
        return noise.span_mask(
            keys_W, lengths_W, width, self.noise_density, self.mean_noise_span_length
        )

    def bounds(self, raw: int) -> Bounds:
        counts = noise.span_counts(np.array([raw]), self.noise_density, self.mean_noise_span_length)
        tokens, spans = (int(count[0]) for count in counts)
        return Bounds(tokens, tokens, spans, tokens + spans)


@dataclasses.dataclass(frozen=True)
class RegularSpans:
    """Equally long, equally spaced spans; see `noise.regular_mask`."""

    noise_density: float = field(0.15, "share of noise", rule=_SHARE)
    shortest: int = field(3, "minimum tokens per span", rule=at_least(1))
    longest: int = field(3, "maximum tokens per span", rule=at_least(1))
    certain = True

    def __post_init__(self) -> None:
        check(self)
        require(self.longest >= self.shortest, "longest", self.longest, "at least shortest")

    def draw(self, keys_W: Array, lengths_W: Array, width: int) -> Array:
        return noise.regular_mask(
            keys_W, lengths_W, width, self.noise_density, self.shortest, self.longest
        )

    def bounds(self, raw: int) -> Bounds:
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


# Masks of independent tokens are planned for this many standard deviations above the mean. One
# window in 700 has more noise, which ends where the targets are full.
_DEVIATIONS = 3


@dataclasses.dataclass(frozen=True)
class IidTokens(Checked):
    """Independent tokens; see `noise.iid_mask`."""

    noise_density: float = field(0.15, "share of noise", rule=_SHARE_OR_ALL)
    certain = False

    def draw(self, keys_W: Array, lengths_W: Array, width: int) -> Array:
        return noise.iid_mask(keys_W, lengths_W, width, self.noise_density)

    def bounds(self, raw: int) -> Bounds:
        # Let x be 1 on a noise token, and x' the x of the previous token, 0 for the first token.
        # Summed over a window, x counts tokens, x (1 - x') spans, and x (2 - x') both together.
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
    """A prefix of random length, treated as noise; see `noise.prefix_mask`."""

    noise_density: float = 0.5
    certain = True

    def draw(
        self, keys_W: Array, lengths_W: Array, width: int, mirrored_W: Array | None = None
    ) -> Array:
        return noise.prefix_mask(keys_W, lengths_W, width, self.noise_density, mirrored_W)

    def bounds(self, raw: int) -> Bounds:
        fewest = int(noise.shortest_prefix(np.array([raw]), self.noise_density)[0])
        return Bounds(fewest, raw - 1, 1, raw)
