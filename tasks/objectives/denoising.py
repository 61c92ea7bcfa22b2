"""Denoising, T5's matrix of objectives: a noise mask, and what it does to inputs and targets.

`DENOISING` holds the objectives of the T5 paper by name.

Dimensions: W windows, N tokens per window.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tasks.objectives import noise
from tasks.objectives.masks import Bounds, IidTokens, Mask, RandomPrefix, RandomSpans, RegularSpans
from tasks.objectives.noise import Array
from tasks.objectives.objective import Examples, Kind, Lengths, Objective, Slots, with_eos
from tasks.terminal.command_line import UserError, nearest
from tasks.vocabulary import TokenIds


@functools.cache
def span_corruption_lengths(
    inputs_length: int, noise_density: float = 0.15, mean_noise_span_length: float = 3.0
) -> tuple[int, int]:
    """Returns (raw tokens, targets length) that exactly fill `inputs_length`: 512 -> (568, 114).

    Source: T5 `data/preprocessors.py`, random_spans_helper, with one sentinel per span and an EOS
    on both sides. Rounding is Python's: half to even, in float64.
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


class _Side(NamedTuple):
    """Makes one side of an example, inputs or targets, from a window."""

    # (tokens_WN, mask_WN, lengths_W, keys_W, ids) -> (tokens, lengths).
    make: Callable[..., tuple[Array, Array]]
    # (tokens of the window, bounds of its mask) -> maximum number of tokens in the side.
    tokens: Callable[[int, Bounds], int] = lambda raw, bounds: raw
    # Bounds of the mask -> maximum number of sentinels in the side.
    sentinels: Callable[[Bounds], int] = lambda bounds: 0


def _replaced(*shares: float) -> _Side:
    """Replaces noise tokens; `shares`: how many become random, how many stay."""

    def make(tokens_WN: Any, mask_WN: Any, lengths_W: Any, keys_W: Any, ids: TokenIds) -> Any:
        sentinel, pieces = ids.size - 1, ids.random_ids
        made_WN = noise.replace_tokens(tokens_WN, mask_WN, keys_W, sentinel, pieces, *shares)
        return made_WN, lengths_W

    return _Side(make, sentinels=lambda bounds: 1)


def _substituted(of_noise: bool, unique: bool) -> _Side:
    """Replaces each noise span, or each span between them, with a sentinel."""

    def make(tokens_WN: Any, mask_WN: Any, lengths_W: Any, keys_W: Any, ids: TokenIds) -> Any:
        spans_WN = mask_WN if of_noise else ~mask_WN
        return noise.substitute_spans(tokens_WN, spans_WN, lengths_W, ids.size - 1, unique)

    def closing(bounds: Bounds) -> int:
        # Text may follow the last span: T5's targets then end in another sentinel.
        return int(not of_noise and bounds.fewest != bounds.tokens)

    return _Side(
        make,
        lambda raw, bounds: raw if of_noise else bounds.tokens_and_spans + closing(bounds),
        lambda bounds: bounds.spans + closing(bounds) if unique else 1,
    )


# Sides of the prefix LM and of span corruption.
_PREFIX = ("drop_nonnoise_tokens", "drop_noise_tokens")
_SPANS = ("noise_span_to_unique_sentinel", "nonnoise_span_to_unique_sentinel")


# T5's functions of a noise mask, by T5's names. "all" is the window itself (T5: targets_fn = None).
# "..._or_itself" keeps one noise token in ten, like BERT.
# Source: T5 `data/preprocessors.py`; Raffel et al. 2020, sections 3.3.1 and 3.3.2.
SIDES: Mapping[str, _Side] = MappingProxyType(
    {
        "noise_token_to_sentinel": _replaced(0.0, 0.0),
        "noise_token_to_random_token_or_sentinel": _replaced(0.1, 0.0),
        "noise_token_to_random_token_or_sentinel_or_itself": _replaced(0.1, 0.1),
        "noise_span_to_unique_sentinel": _substituted(of_noise=True, unique=True),
        "nonnoise_span_to_unique_sentinel": _substituted(of_noise=False, unique=True),
        "noise_span_to_sentinel": _substituted(of_noise=True, unique=False),
        "nonnoise_span_to_sentinel": _substituted(of_noise=False, unique=False),
        "drop_noise_tokens": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.compress(
                tokens, ~mask & noise.within(lengths, mask.shape[1])
            ),
            lambda raw, bounds: raw - bounds.fewest,
        ),
        "drop_nonnoise_tokens": _Side(
            lambda tokens, mask, lengths, keys, ids: noise.compress(tokens, mask),
            lambda raw, bounds: bounds.tokens,
        ),
        "permute_noise_tokens": _Side(
            lambda tokens, mask, lengths, keys, ids: (noise.permute(tokens, mask, keys), lengths)
        ),
        "all": _Side(lambda tokens, mask, lengths, keys, ids: (tokens, lengths)),
    }
)


@dataclasses.dataclass(frozen=True)
class Denoising(Objective):
    """Makes inputs and targets from a window and a noise mask.

    `inputs` and `targets` name functions in SIDES. With random spans of one sentinel each, a window
    exactly fills the inputs; with other masks it is one token shorter than the inputs.

    Source: T5 `data/preprocessors.py`, denoise; Raffel et al. 2020, section 3.3.
    Differences: if independent noise needs longer targets or more sentinels than available, T5 cuts
    the targets and uses ordinary pieces as sentinels; here the noise ends earlier.

    Raises ValueError at construction if a side is not in SIDES.
    """

    mask: Mask = dataclasses.field(default_factory=RandomSpans)
    inputs: str = "noise_span_to_unique_sentinel"
    targets: str = "nonnoise_span_to_unique_sentinel"
    features = ("inputs", "targets")
    appends_eos = True

    def __post_init__(self) -> None:
        for side in (self.inputs, self.targets):
            if side not in SIDES:
                raise ValueError(f"unknown side {side!r}{nearest(side, SIDES)}")

    @property
    def codes_text(self) -> bool:
        return isinstance(self.mask, RandomPrefix) and self.targets == "drop_noise_tokens"

    def window_tokens(self, lengths: Lengths) -> int:
        raw, needed = self._needed(lengths.inputs)
        if needed > lengths.targets:
            raise UserError(
                f"denoising of inputs length {lengths.inputs} makes targets of up to {needed} "
                f"tokens, but the targets length is {lengths.targets}: set it to {needed} or more"
            )
        return raw

    def _needed(self, inputs_length: int) -> tuple[int, int]:
        """Returns a window's number of tokens, and the shortest sufficient targets length."""
        raw = self._raw(inputs_length)
        if inputs_length < 4 or raw < 2:
            raise UserError(f"inputs length {inputs_length} is too short for denoising")
        return raw, SIDES[self.targets].tokens(raw, self.mask.bounds(raw)) + 1

    def _raw(self, inputs_length: int) -> int:
        if not isinstance(self.mask, RandomSpans) or self.inputs != "noise_span_to_unique_sentinel":
            return inputs_length - 1
        raw, _ = span_corruption_lengths(
            inputs_length, self.mask.noise_density, self.mask.mean_noise_span_length
        )
        # For less noise than half a span, T5 plans no span but draws one, which would be cut.
        while raw > 1:
            bounds = self.mask.bounds(raw)
            if raw - bounds.tokens + bounds.spans + 1 <= inputs_length:
                break
            raw -= 1
        return raw

    def fitting(self, inputs_length: int) -> Lengths:
        """Returns `inputs_length` and the shortest targets length that suffices for it."""
        return Lengths(inputs_length, self._needed(inputs_length)[1])

    def sentinels(self, lengths: Lengths) -> int:
        bounds = self.mask.bounds(self.window_tokens(lengths))
        return max(SIDES[side].sentinels(bounds) for side in (self.inputs, self.targets))

    def kinds(self, lengths: Lengths) -> tuple[Kind, ...]:
        raw = self.window_tokens(lengths)
        bounds = self.mask.bounds(raw)
        sides = (self.inputs, self.targets)
        if isinstance(self.mask, RandomPrefix) and sides == _PREFIX:
            prefixes = bounds.fewest + raw - 1
            return (Kind(1.0, 0, 2, prefixes + 2, 2 * raw - prefixes + 2),)
        if isinstance(self.mask, RandomSpans) and sides == _SPANS:
            inputs = raw - bounds.tokens + bounds.spans + 1
            return (Kind(1.0, 0, 1, inputs, bounds.tokens_and_spans + 1),)
        return super().kinds(lengths)

    def packed_examples(
        self,
        tokens_WN: Array,
        lengths_W: Array,
        keys_W: Array,
        slots: Slots,
        lengths: Lengths,
        ids: TokenIds,
    ) -> Examples:
        if not isinstance(self.mask, RandomPrefix):
            return self.examples(tokens_WN, lengths_W, keys_W, lengths, ids)
        width = tokens_WN.shape[1]
        mask_WN = self.mask.draw(keys_W, lengths_W, width, slots.mirrored_W)
        return self._examples(tokens_WN, mask_WN, lengths_W, keys_W, ids)

    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        mask_WN = self.mask.draw(keys_W, lengths_W, tokens_WN.shape[1])
        if not self.mask.certain:
            mask_WN = self._limited(mask_WN, lengths, ids)
        return self._examples(tokens_WN, mask_WN, lengths_W, keys_W, ids)

    def _examples(
        self, tokens_WN: Array, mask_WN: Array, lengths_W: Array, keys_W: Array, ids: TokenIds
    ) -> Examples:
        keys_W = noise.fold_in(keys_W, 2)
        return {
            name: with_eos(*SIDES[side].make(tokens_WN, mask_WN, lengths_W, keys_W, ids), ids)
            for name, side in (("inputs", self.inputs), ("targets", self.targets))
        }

    def _limited(self, mask_WN: Array, lengths: Lengths, ids: TokenIds) -> Array:
        if self.inputs == "noise_span_to_unique_sentinel":
            mask_WN = noise.limit_noise(mask_WN, 0, mask_WN.shape[1], ids.sentinels)
        # EOS takes one position; a sentinel for text after the last span takes another.
        if self.targets == "nonnoise_span_to_unique_sentinel":
            return noise.limit_noise(mask_WN, 1, lengths.targets - 2, ids.sentinels - 1)
        if self.targets == "nonnoise_span_to_sentinel":
            return noise.limit_noise(mask_WN, 1, lengths.targets - 2, mask_WN.shape[1])
        if self.targets == "drop_nonnoise_tokens":
            return noise.limit_noise(mask_WN, 0, lengths.targets - 1, mask_WN.shape[1])
        return mask_WN


def span_corruption(noise_density: float = 0.15, mean_noise_span_length: float = 3.0) -> Denoising:
    """Returns T5's span corruption. Source: Raffel et al. 2020, section 3.1.4."""
    return Denoising(RandomSpans(noise_density, mean_noise_span_length))


def prefix_lm(noise_density: float = 0.5) -> Denoising:
    """Returns the prefix LM: inputs are a prefix of random length, targets the rest of the window.

    Source: Raffel et al. 2020, section 3.2.3; T5 `data/preprocessors.py`, prefix_lm.
    """
    return Denoising(RandomPrefix(noise_density), "drop_nonnoise_tokens", "drop_noise_tokens")


# The objectives of the T5 paper, by its experiments' names. Letters mean: u unique sentinels, d
# dropped, m a mask token, r random tokens, s sentinels, k kept, f the full text. Numbers are span
# lengths and percentages.
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
