"""Random numbers, noise masks and noise substitution for batches of windows.

Every function is pure in (tokens, keys): a window's noise depends on its key alone, not on the
batch, host or worker. A mask is bool [W, N], True on noise and False beyond a window's length.

Dimensions: W windows, N tokens per window, S spans, D draws.
"""

import functools
import hashlib
import importlib
from typing import Any

import numpy as np

Array = np.ndarray
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Separates evaluation noise from training noise under the same seed.
_EVALUATION_EPOCH = 0xFFFF_FFFF


@functools.cache
def _loops() -> Any:
    return importlib.import_module("tasks.objectives.noise_loops")  # takes a second


def _mix(x: Array) -> Array:
    """SplitMix64's finaliser.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 17
    with the constants of Stafford's Mix13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold_in(key: Array | int, value: Array | int) -> Array:
    """Derives new keys from keys and values: uint64, of their broadcast shape."""
    with np.errstate(over="ignore"):
        return _mix(
            _mix(np.asarray(key).astype(np.uint64) + _GOLDEN)
            + (np.asarray(value).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        )


def task_seed(seed: int, task: str) -> int:
    """Returns the seed for a task's order and noise, independent of a mixture's other tasks."""
    digest = hashlib.sha256(task.encode()).digest()
    return int(fold_in(seed, int.from_bytes(digest[:8], "little")))


def training_keys(seed: int, task: str, epochs_W: Array | int, windows_W: Array) -> Array:
    """Returns the noise keys of a task's training windows (indices in the split), uint64 [W]."""
    return fold_in(fold_in(task_seed(seed, task), epochs_W), windows_W)


def evaluation_keys(seed: int, windows_W: Array) -> Array:
    """Returns noise keys for evaluation, uint64 [W], equal in every evaluation and task."""
    return fold_in(fold_in(seed, _EVALUATION_EPOCH), windows_W)


def window_keys(seed: int, task: str, split: str, epoch: int, windows_W: Array) -> Array:
    """Returns `training_keys` for split "train", else `evaluation_keys`, uint64 [W]."""
    if split == "train":
        return training_keys(seed, task, epoch, windows_W)
    return evaluation_keys(seed, windows_W)


def uniforms(keys_W: Array, count: int) -> Array:
    """Returns the first `count` draws of each key's stream, float64 [W, count] in [0, 1)."""
    with np.errstate(over="ignore"):
        counters = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(keys_W[:, None] + counters)
    return (bits >> np.uint64(11)) * 2.0**-53


def integers(keys_W: Array, least: Array | int, most: Array | int) -> Array:
    """Returns one uniform draw in [`least`, `most`] per key, int64 [W]."""
    choices_W = np.asarray(most) - least + 1
    return least + (uniforms(keys_W, 1)[:, 0] * choices_W).astype(np.int64)


def within(lengths_W: Array, width: int) -> Array:
    """Returns bool [W, width], True where a window has a token."""
    return np.arange(width) < lengths_W[:, None]


def span_counts(
    lengths_W: Array, noise_density: float, mean_noise_span_length: float
) -> tuple[Array, Array]:
    """Returns (noise tokens, noise spans) per window, each int64 [W].

    Rounding is half to even in float32, as in T5; float64 differs on ties (190 x 0.15).

    Source: T5 `data/preprocessors.py`, random_spans_noise_mask.
    Differences: T5 fails when there are more spans than non-noise tokens; here spans are capped.
    """
    total_W = np.maximum(lengths_W, 2)
    noise_W = np.rint(total_W.astype(np.float32) * np.float32(noise_density)).astype(np.int64)
    noise_W = np.clip(noise_W, 1, total_W - 1)
    spans_W = np.rint(noise_W.astype(np.float32) / np.float32(mean_noise_span_length))
    spans_W = np.minimum(spans_W.astype(np.int64), np.minimum(noise_W, total_W - noise_W))
    return noise_W, np.maximum(spans_W, 1)


def compositions(keys_W: Array, totals_W: Array, parts_W: Array) -> Array:
    """Splits each total into `parts` positive integers, uniformly over all such splits.

    Each total is at least its number of parts, which is at least 1. Returns int64 [W, max(parts)],
    zero after a window's last part.

    Source: T5 `data/preprocessors.py`, random_spans_noise_mask, _random_segmentation.
    Differences: T5 shuffles as many flags as there are tokens; the distribution is the same.
    """
    return _loops().compositions(keys_W, totals_W, parts_W, int(parts_W.max(initial=1)))


def alternate(clean_WS: Array, noise_WS: Array, lengths_W: Array, width: int) -> Array:
    """Returns alternating spans, non-noise first, truncated to the lengths: bool [W, width].

    Span lengths are int64 [W, S], 0 after the last span.
    """
    return _loops().alternate(clean_WS, noise_WS, lengths_W, width)


def span_mask(
    keys_W: Array,
    lengths_W: Array,
    width: int,
    noise_density: float = 0.15,
    mean_noise_span_length: float = 3.0,
) -> Array:
    """Returns T5's random spans: bool [W, width].

    A window begins with a non-noise span and ends with a noise span; `span_counts` gives the
    numbers of noise tokens and spans, and both kinds of tokens are split uniformly into spans.

    Source: Raffel et al. 2020, section 3.1.4; T5 `data/preprocessors.py`, random_spans_noise_mask.
    """
    noise_W, spans_W = span_counts(lengths_W, noise_density, mean_noise_span_length)
    clean_W = np.maximum(lengths_W, 2) - noise_W
    clean_WS = compositions(fold_in(keys_W, 1), clean_W, spans_W)
    noise_WS = compositions(fold_in(keys_W, 0), noise_W, spans_W)
    return alternate(clean_WS, noise_WS, lengths_W, width)


def regular_mask(
    keys_W: Array, lengths_W: Array, width: int, noise_density: float, shortest: int, longest: int
) -> Array:
    """Returns equally long, equally spaced spans in each window: bool [W, width].

    The length is uniform from `shortest` to `longest`; a span begins every
    `regular_period(length)` tokens, from a uniform offset.

    Source: T5 `data/preprocessors.py`, regular_noise_mask.
    """
    length_W = integers(fold_in(keys_W, 0), shortest, longest)
    period_W = regular_period(length_W, noise_density)
    offset_W = integers(fold_in(keys_W, 1), 0, period_W - 1)
    phase_WN = (np.arange(width) + offset_W[:, None]) % period_W[:, None]
    return (phase_WN < length_W[:, None]) & within(lengths_W, width)


def regular_period(span_length: Array | int, noise_density: float) -> Array:
    """Returns the distance in tokens between the starts of regular spans, int64."""
    period = np.asarray(span_length, np.float32) / np.float32(noise_density)
    return np.rint(period).astype(np.int64)


def iid_mask(keys_W: Array, lengths_W: Array, width: int, noise_density: float) -> Array:
    """Returns independent noise of equal probability for every token: bool [W, width].

    Source: T5 `data/preprocessors.py`, iid_noise_mask.
    """
    return (uniforms(keys_W, width) < noise_density) & within(lengths_W, width)


def prefix_mask(
    keys_W: Array,
    lengths_W: Array,
    width: int,
    noise_density: float = 0.5,
    mirrored_W: Array | None = None,
) -> Array:
    """Returns a prefix of random length: bool [W, width].

    In a window of L tokens, the length is uniform from `shortest_prefix` to L - 1. Where
    `mirrored_W` is True, the length is the sum of both bounds minus the draw, so a window and its
    mirrored twin (same key) have prefixes of constant total length.

    Source: T5 `data/preprocessors.py`, random_prefix_noise_mask.
    """
    least_W = shortest_prefix(lengths_W, noise_density)
    most_W = np.maximum(lengths_W - 1, 0)
    prefix_W = integers(keys_W, least_W, most_W)
    if mirrored_W is not None:
        prefix_W = np.where(mirrored_W, least_W + most_W - prefix_W, prefix_W)
    return within(prefix_W, width)


def shortest_prefix(lengths_W: Array, noise_density: float) -> Array:
    """Returns the minimum prefix length of `prefix_mask`, int64 [W]: 1 token at density 0.5."""
    most_W = np.maximum(lengths_W - 1, 0)
    least_W = np.rint((1 - 2 * noise_density) * most_W).astype(np.int64)
    return np.minimum(np.maximum(least_W, 1), most_W)


def run_starts(mask_WN: Array) -> Array:
    """Returns bool [W, N], True where a run of True begins."""
    starts_WN = mask_WN.copy()
    starts_WN[:, 1:] &= ~mask_WN[:, :-1]
    return starts_WN


def limit_noise(mask_WN: Array, per_span: int, limit: int, spans: int) -> Array:
    """Cuts the mask of each window before the first token that exceeds `limit` or `spans`.

    `limit` counts 1 for each token of noise and `per_span` for each span.
    """
    spans_WN = np.cumsum(run_starts(mask_WN), axis=1, dtype=np.int32)
    taken_WN = np.cumsum(mask_WN, axis=1, dtype=np.int32) + per_span * spans_WN
    return mask_WN & (taken_WN <= limit) & (spans_WN <= spans)


def substitute_spans(
    tokens_WN: Array, mask_WN: Array, lengths_W: Array, first_sentinel: int, unique: bool = True
) -> tuple[Array, Array]:
    """Replaces each run of True in `mask_WN` with one sentinel, descending if `unique`.

    Returns (tokens int32 [W, any], left-aligned and padded with 0, their number int64 [W]).

    Source: T5 `data/preprocessors.py`, noise_span_to_unique_sentinel and noise_span_to_sentinel.
    """
    tokens_WN = tokens_WN.astype(np.int32, copy=False)
    found = _loops().substitute_spans(tokens_WN, mask_WN, lengths_W, first_sentinel, int(unique))
    return _narrow(*found)


def compress(tokens_WN: Array, keep_WN: Array) -> tuple[Array, Array]:
    """Left-aligns kept tokens: (tokens int32 [W, any] padded with 0, their number int64 [W])."""
    return _narrow(*_loops().compress(tokens_WN.astype(np.int32, copy=False), keep_WN))


def _narrow(tokens_WN: Array, counts_W: Array) -> tuple[Array, Array]:
    return tokens_WN[:, : int(counts_W.max(initial=0))], counts_W


def permute(tokens_WN: Array, mask_WN: Array, keys_W: Array) -> Array:
    """Shuffles the masked tokens of each window among their positions: int32 [W, N].

    Source: T5 `data/preprocessors.py`, permute_noise_tokens.
    """
    draws_WN = np.where(mask_WN, uniforms(keys_W, mask_WN.shape[1]), 1.0)
    order_WN = np.argsort(draws_WN, axis=1, kind="stable")
    out_WN = tokens_WN.astype(np.int32)
    shuffled_WN = np.take_along_axis(tokens_WN, order_WN, axis=1)
    out_WN[mask_WN] = shuffled_WN[within(np.count_nonzero(mask_WN, axis=1), mask_WN.shape[1])]
    return out_WN


def replace_tokens(
    tokens_WN: Array,
    mask_WN: Array,
    keys_W: Array,
    mask_token: int,
    pieces: Array,
    random_share: float = 0.0,
    kept_share: float = 0.0,
) -> Array:
    """Replaces masked tokens independently: int32 [W, N].

    A masked token becomes a random id from `pieces` with probability `random_share`, stays with
    probability `kept_share`, and becomes `mask_token` otherwise.

    Source: Devlin et al. 2019, section 3.1; T5 `data/preprocessors.py`,
      noise_token_to_random_token_or_sentinel.
    Differences: T5 draws random tokens from all ids above 2, including sentinels.
    """
    out_WN = np.where(mask_WN, np.int32(mask_token), tokens_WN).astype(np.int32)
    if random_share or kept_share:
        draws_WN = uniforms(keys_W, mask_WN.shape[1])
        random_WN = mask_WN & (draws_WN < random_share)
        kept_WN = mask_WN & (draws_WN >= 1 - kept_share)
        out_WN[kept_WN] = tokens_WN[kept_WN]
        pieces_WN = uniforms(fold_in(keys_W, 0), mask_WN.shape[1])[random_WN]
        out_WN[random_WN] = pieces[(pieces_WN * len(pieces)).astype(np.int32)]
    return out_WN
