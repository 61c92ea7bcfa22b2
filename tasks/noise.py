"""Random numbers and span masks for whole batches of windows, in numpy, without state.

Every function is pure in (tokens, keys): a window's noise depends on its key alone, not on the
batch, host or worker it is computed in.

Dimensions: W windows, N tokens of a window.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser. Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom
    number generators", figure 17 with the constants of Stafford's Mix13."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold_in(key: np.ndarray | int, value: np.ndarray | int) -> np.ndarray:
    """Derives new keys: uint64 of the broadcast shape of `key` and `value`."""
    with np.errstate(over="ignore"):
        return _mix(
            _mix(np.asarray(key).astype(np.uint64) + _GOLDEN)
            + (np.asarray(value).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        )


def uniforms(keys_W: np.ndarray, count: int) -> np.ndarray:
    """Returns float64 [W, count] in [0, 1), the first draws of each key's stream."""
    with np.errstate(over="ignore"):
        counters = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(keys_W[:, None] + counters)
    return (bits >> np.uint64(11)) * 2.0**-53


def span_counts(
    lengths_W: np.ndarray, noise_density: float, mean_noise_span_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (noise tokens, noise spans) of windows of the given lengths, int64 [W] each.

    Rounding is half to even in float32, as T5 does it: float64 differs on ties (190 x 0.15).

    Source: T5 `data/preprocessors.py`, random_spans_noise_mask.
    Differences: T5 fails when there are more spans than non-noise tokens; here spans are capped.
    """
    total_W = np.maximum(lengths_W, 2)
    noise_W = np.rint(total_W.astype(np.float32) * np.float32(noise_density)).astype(np.int64)
    noise_W = np.clip(noise_W, 1, total_W - 1)
    spans_W = np.rint(noise_W.astype(np.float32) / np.float32(mean_noise_span_length))
    spans_W = np.minimum(spans_W.astype(np.int64), np.minimum(noise_W, total_W - noise_W))
    return noise_W, np.maximum(spans_W, 1)


def compositions(totals_W: np.ndarray, parts_W: np.ndarray, uniforms_WN: np.ndarray) -> np.ndarray:
    """Splits each total into `parts` positive integers, uniformly over all ways to do so.

    Args:
      totals_W: int [W], each at least its number of parts.
      parts_W: int [W], each at least 1.
      uniforms_WN: float [W, max(totals) - 1], the draws that shuffle the borders.

    Returns:
      int64 [W, max(parts)], zero after a window's last part.

    Source: T5 `data/preprocessors.py`, random_spans_noise_mask, _random_segmentation; a stateless
    shuffle is a gather by the argsort of uniforms, as in seqio.stateless_shuffle.
    """
    windows = len(totals_W)
    columns = np.arange(uniforms_WN.shape[1])
    order_WN = np.argsort(
        np.where(columns < totals_W[:, None] - 1, uniforms_WN, np.inf), axis=1, kind="stable"
    )
    border_WN = (order_WN < parts_W[:, None] - 1) & (columns < totals_W[:, None] - 1)
    part_WN = np.zeros((windows, uniforms_WN.shape[1] + 1), np.int64)
    np.cumsum(border_WN, axis=1, out=part_WN[:, 1:])
    inside = np.arange(part_WN.shape[1]) < totals_W[:, None]
    most = int(parts_W.max(initial=1))
    cell_WN = part_WN + np.arange(windows)[:, None] * most
    return np.bincount(cell_WN[inside], minlength=windows * most).reshape(windows, most)


def span_mask(
    keys_W: np.ndarray,
    lengths_W: np.ndarray,
    width: int,
    noise_density: float = 0.15,
    mean_noise_span_length: float = 3.0,
) -> np.ndarray:
    """T5's random spans: bool [W, width], True on noise, False beyond a window's length.

    A window begins with a non-noise span and ends with a noise span; the number of noise tokens and
    spans is that of `span_counts`, and both kinds are split uniformly.

    Source: Raffel et al. 2020, section 3.1.4; T5 `data/preprocessors.py`, random_spans_noise_mask.
    """
    noise_W, spans_W = span_counts(lengths_W, noise_density, mean_noise_span_length)
    clean_W = np.maximum(lengths_W, 2) - noise_W

    def parts(totals_W: np.ndarray, stream: int) -> np.ndarray:
        draws = uniforms(fold_in(keys_W, stream), max(int(totals_W.max(initial=1)) - 1, 0))
        return compositions(totals_W, spans_W, draws)

    lengths_WS = np.stack([parts(clean_W, 1), parts(noise_W, 0)], axis=2).reshape(len(keys_W), -1)
    starts_WS = np.cumsum(lengths_WS, axis=1)[:, :-1]
    # Count, at every position, how many spans have begun before or at it: odd means noise.
    position_WS = np.minimum(starts_WS, width) + np.arange(len(keys_W))[:, None] * (width + 1)
    real_WS = np.arange(starts_WS.shape[1]) < 2 * spans_W[:, None] - 1
    begun = np.bincount(position_WS[real_WS], minlength=len(keys_W) * (width + 1))
    begun_WN = np.cumsum(begun.reshape(len(keys_W), width + 1)[:, :width], axis=1)
    return (begun_WN % 2 == 1) & (np.arange(width) < lengths_W[:, None])


def substitute_spans(
    tokens_WN: np.ndarray, mask_WN: np.ndarray, lengths_W: np.ndarray, first_sentinel: int
) -> tuple[np.ndarray, np.ndarray]:
    """Replaces each run of True in `mask_WN` by one sentinel, descending from `first_sentinel`.

    Returns:
      (tokens int32 [W, N] moved to the left and padded with 0, their number int64 [W]).

    Source: T5 `data/preprocessors.py`, noise_span_to_unique_sentinel.
    """
    valid_WN = np.arange(tokens_WN.shape[1]) < lengths_W[:, None]
    masked_WN = mask_WN & valid_WN
    first_WN = masked_WN.copy()
    first_WN[:, 1:] &= ~masked_WN[:, :-1]
    sentinel_WN = first_sentinel + 1 - np.cumsum(first_WN, axis=1)
    return compress(np.where(first_WN, sentinel_WN, tokens_WN), valid_WN & (first_WN | ~masked_WN))


def compress(tokens_WN: np.ndarray, keep_WN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moves the kept tokens of each window to the left.

    Returns:
      (tokens int32 [W, N] padded with 0, their number int64 [W]).
    """
    place_WN = np.cumsum(keep_WN, axis=1) - 1
    out_WN = np.zeros(tokens_WN.shape, np.int32)
    windows, _ = np.nonzero(keep_WN)
    out_WN[windows, place_WN[keep_WN]] = tokens_WN[keep_WN]
    return out_WN, keep_WN.sum(axis=1)
