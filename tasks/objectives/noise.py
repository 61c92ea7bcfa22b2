"""Random numbers, noise masks and the replacement of noise, for batches of windows.

Every function is pure in (tokens, keys): a window's noise depends on its key alone, not on the
batch, host or worker it is computed in. A mask is bool [W, N], True on noise and False beyond a
window's length; substitutions make inputs or targets from a window and its mask.

Dimensions: W windows, N tokens of a window, S spans, D draws.
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Separates the noise of evaluation from that of training under the same seed.
_EVALUATION_EPOCH = 0xFFFF_FFFF


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 17
    with the constants of Stafford's Mix13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold_in(key: np.ndarray | int, value: np.ndarray | int) -> np.ndarray:
    """Returns new keys from keys and values: uint64, of their broadcast shape."""
    with np.errstate(over="ignore"):
        return _mix(
            _mix(np.asarray(key).astype(np.uint64) + _GOLDEN)
            + (np.asarray(value).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        )


def task_seed(seed: int, task: str) -> int:
    """Returns the seed of a task's order and noise in a run with `seed`.

    Tasks that read the same windows read them in different orders, and a task that joins a mixture
    later changes nothing for the others.
    """
    digest = hashlib.sha256(task.encode()).digest()
    return int(fold_in(seed, int.from_bytes(digest[:8], "little")))


def training_keys(
    seed: int, task: str, epochs_W: np.ndarray | int, windows_W: np.ndarray
) -> np.ndarray:
    """Returns the noise keys of a task's windows in training, uint64 [W].

    Args:
      seed: the run's.
      task: name of the task.
      epochs_W: int [W], or one epoch for all windows.
      windows_W: int [W], indices in the task's training split.
    """
    return fold_in(fold_in(task_seed(seed, task), epochs_W), windows_W)


def evaluation_keys(seed: int, windows_W: np.ndarray) -> np.ndarray:
    """Returns the noise keys of a split's windows in evaluation, uint64 [W].

    They are the same at every evaluation, and for every task.
    """
    return fold_in(fold_in(seed, _EVALUATION_EPOCH), windows_W)


def window_keys(seed: int, task: str, split: str, epoch: int, windows_W: np.ndarray) -> np.ndarray:
    """Returns the noise keys with which a run reads windows of `split`, uint64 [W].

    A run trains on the split "train" and evaluates on any other, where `epoch` has no effect.
    """
    if split == "train":
        return training_keys(seed, task, epoch, windows_W)
    return evaluation_keys(seed, windows_W)


def uniforms(keys_W: np.ndarray, count: int) -> np.ndarray:
    """Returns the first `count` draws of each key's stream, float64 [W, count] in [0, 1)."""
    with np.errstate(over="ignore"):
        counters = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(keys_W[:, None] + counters)
    return (bits >> np.uint64(11)) * 2.0**-53


def integers(keys_W: np.ndarray, least: np.ndarray | int, most: np.ndarray | int) -> np.ndarray:
    """Returns one draw per key, int64 [W], uniform from `least` to `most`, inclusive."""
    choices_W = np.asarray(most) - least + 1
    return least + (uniforms(keys_W, 1)[:, 0] * choices_W).astype(np.int64)


def within(lengths_W: np.ndarray, width: int) -> np.ndarray:
    """Returns bool [W, width], True at the positions of a window's tokens."""
    return np.arange(width) < lengths_W[:, None]


def span_counts(
    lengths_W: np.ndarray, noise_density: float, mean_noise_span_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (noise tokens, noise spans) of windows of the given lengths, int64 [W] each.

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


def subsets(keys_W: np.ndarray, totals_W: np.ndarray, sizes_W: np.ndarray) -> np.ndarray:
    """Chooses `size` of the numbers below `total`; every subset is equally likely.

    A subset is the first `size` different numbers of a stream of draws; if it has more than half of
    the numbers, the others are drawn instead. So the number of draws is about that of spans, while
    a shuffle needs one for every token.

    Args:
      keys_W: uint64 [W].
      totals_W: int [W].
      sizes_W: int [W], each at most its total.

    Returns:
      bool [W, max(totals)], True on the chosen.
    """
    from tasks.objectives import noise_loops

    width = max(int(totals_W.max(initial=0)), 1)
    return noise_loops.subsets(keys_W, totals_W, sizes_W, width).view(bool)


def compositions(keys_W: np.ndarray, totals_W: np.ndarray, parts_W: np.ndarray) -> np.ndarray:
    """Splits each total into `parts` positive integers; every way to do so is equally likely.

    Args:
      keys_W: uint64 [W].
      totals_W: int [W], each at least its number of parts.
      parts_W: int [W], each at least 1.

    Returns:
      int64 [W, max(parts)], zero after a window's last part.

    Source: T5 `data/preprocessors.py`, random_spans_noise_mask, _random_segmentation.
    Differences: T5 shuffles as many flags as there are tokens; the distribution is the same.
    """
    from tasks.objectives import noise_loops

    return noise_loops.compositions(keys_W, totals_W, parts_W, int(parts_W.max(initial=1)))


def alternate(
    clean_WS: np.ndarray, noise_WS: np.ndarray, lengths_W: np.ndarray, width: int
) -> np.ndarray:
    """Returns the mask of alternating spans, non-noise first: bool [W, width], cut at the lengths.

    Args:
      clean_WS: int64 [W, S] lengths of the non-noise spans, 0 after the last.
      noise_WS: int64 [W, S] lengths of the noise spans, 0 after the last.
      lengths_W: int64 [W], each at most `width`.
      width: tokens of a window.
    """
    from tasks.objectives import noise_loops

    return noise_loops.alternate(clean_WS, noise_WS, lengths_W, width)


def span_mask(
    keys_W: np.ndarray,
    lengths_W: np.ndarray,
    width: int,
    noise_density: float = 0.15,
    mean_noise_span_length: float = 3.0,
) -> np.ndarray:
    """Returns T5's random spans: bool [W, width], True on noise, False beyond a window's length.

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
    keys_W: np.ndarray,
    lengths_W: np.ndarray,
    width: int,
    noise_density: float = 0.15,
    shortest: int = 3,
    longest: int = 3,
) -> np.ndarray:
    """Returns spans of equal length at equal distance in each window: bool [W, width].

    The length is uniform from `shortest` to `longest`; a span begins every
    `regular_period(length)` tokens, from a uniform offset.

    Source: T5 `data/preprocessors.py`, regular_noise_mask.
    """
    length_W = integers(fold_in(keys_W, 0), shortest, longest)
    period_W = regular_period(length_W, noise_density)
    offset_W = integers(fold_in(keys_W, 1), 0, period_W - 1)
    phase_WN = (np.arange(width) + offset_W[:, None]) % period_W[:, None]
    return (phase_WN < length_W[:, None]) & within(lengths_W, width)


def regular_period(span_length: np.ndarray | int, noise_density: float) -> np.ndarray:
    """Returns the distance between the beginnings of regular spans in tokens, int64."""
    period = np.asarray(span_length, np.float32) / np.float32(noise_density)
    return np.rint(period).astype(np.int64)


def iid_mask(
    keys_W: np.ndarray, lengths_W: np.ndarray, width: int, noise_density: float = 0.15
) -> np.ndarray:
    """Returns independent noise, with the same probability for every token: bool [W, width].

    Source: T5 `data/preprocessors.py`, iid_noise_mask.
    """
    return (uniforms(keys_W, width) < noise_density) & within(lengths_W, width)


def prefix_mask(
    keys_W: np.ndarray,
    lengths_W: np.ndarray,
    width: int,
    noise_density: float = 0.5,
    mirrored_W: np.ndarray | None = None,
) -> np.ndarray:
    """Returns a prefix of random length: bool [W, width].

    In a window of L tokens its length is uniform from `shortest_prefix` to L - 1. Where
    `mirrored_W` is True it is what is missing from the draw to the sum of both, so that two windows
    with one key, of which one is mirrored, have prefixes of constant length together.

    Source: T5 `data/preprocessors.py`, random_prefix_noise_mask.
    """
    least_W = shortest_prefix(lengths_W, noise_density)
    most_W = np.maximum(lengths_W - 1, 0)
    prefix_W = integers(keys_W, least_W, most_W)
    if mirrored_W is not None:
        prefix_W = np.where(mirrored_W, least_W + most_W - prefix_W, prefix_W)
    return within(prefix_W, width)


def shortest_prefix(lengths_W: np.ndarray, noise_density: float) -> np.ndarray:
    """Returns the shortest prefix of `prefix_mask`, int64 [W]: 1 token at density 0.5."""
    most_W = np.maximum(lengths_W - 1, 0)
    least_W = np.rint((1 - 2 * noise_density) * most_W).astype(np.int64)
    return np.minimum(np.maximum(least_W, 1), most_W)


def run_starts(mask_WN: np.ndarray) -> np.ndarray:
    """Returns bool [W, N], True where a run of True begins."""
    starts_WN = mask_WN.copy()
    starts_WN[:, 1:] &= ~mask_WN[:, :-1]
    return starts_WN


def limit_noise(
    mask_WN: np.ndarray, per_token: int, per_span: int, limit: int, spans: int
) -> np.ndarray:
    """Ends the noise of a window where more would not fit.

    Args:
      mask_WN: bool [W, N].
      per_token, per_span: cost of a token and of a span of noise.
      limit: largest total cost.
      spans: largest number of spans.

    Returns:
      bool [W, N], the mask up to the first token that exceeds a limit.
    """
    spans_WN = np.cumsum(run_starts(mask_WN), axis=1, dtype=np.int32)
    taken_WN = per_token * np.cumsum(mask_WN, axis=1, dtype=np.int32) + per_span * spans_WN
    return mask_WN & (taken_WN <= limit) & (spans_WN <= spans)


def substitute_spans(
    tokens_WN: np.ndarray,
    mask_WN: np.ndarray,
    lengths_W: np.ndarray,
    first_sentinel: int,
    unique: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Replaces each run of True in `mask_WN` by one sentinel.

    Sentinels are `first_sentinel`, `first_sentinel - 1`, … if they are `unique`, else always
    `first_sentinel`.

    Returns:
      (tokens int32 [W, any] moved to the left and padded with 0, their number int64 [W]).

    Source: T5 `data/preprocessors.py`, noise_span_to_unique_sentinel and noise_span_to_sentinel.
    """
    from tasks.objectives import noise_loops

    return _narrow(
        *noise_loops.substitute_spans(
            tokens_WN.astype(np.int32, copy=False), mask_WN, lengths_W, first_sentinel, int(unique)
        )
    )


def compress(tokens_WN: np.ndarray, keep_WN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moves the kept tokens of each window to the left.

    Returns:
      (tokens int32 [W, any] padded with 0, their number int64 [W]).
    """
    from tasks.objectives import noise_loops

    return _narrow(*noise_loops.compress(tokens_WN.astype(np.int32, copy=False), keep_WN))


def _narrow(tokens_WN: np.ndarray, counts_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both, without the columns that are padding in all windows."""
    return tokens_WN[:, : int(counts_W.max(initial=0))], counts_W


def permute(tokens_WN: np.ndarray, mask_WN: np.ndarray, keys_W: np.ndarray) -> np.ndarray:
    """Shuffles the tokens of each window that are True in `mask_WN` among their positions.

    Returns:
      int32 [W, N].

    Source: T5 `data/preprocessors.py`, permute_noise_tokens.
    """
    draws_WN = np.where(mask_WN, uniforms(keys_W, mask_WN.shape[1]), 1.0)
    order_WN = np.argsort(draws_WN, axis=1, kind="stable")
    out_WN = tokens_WN.astype(np.int32)
    shuffled_WN = np.take_along_axis(tokens_WN, order_WN, axis=1)
    out_WN[mask_WN] = shuffled_WN[within(np.count_nonzero(mask_WN, axis=1), mask_WN.shape[1])]
    return out_WN


def replace_tokens(
    tokens_WN: np.ndarray,
    mask_WN: np.ndarray,
    keys_W: np.ndarray,
    mask_token: int,
    pieces: np.ndarray,
    random_share: float = 0.0,
    kept_share: float = 0.0,
) -> np.ndarray:
    """Replaces each masked token by `mask_token`, a random piece or nothing, independently.

    Args:
      tokens_WN: int32 [W, N].
      mask_WN: bool [W, N].
      keys_W: uint64 [W].
      mask_token: id that replaces a token.
      pieces: ids of the pieces that are drawn, `TokenIds.random_ids`.
      random_share: probability of a random piece instead, in [0, 1].
      kept_share: probability that the token stays, in [0, 1 - random_share].

    Returns:
      int32 [W, N].

    Source: Devlin et al. 2019, section 3.1; T5 `data/preprocessors.py`,
      noise_token_to_random_token_or_sentinel.
    Differences: T5 draws random tokens among all ids from 3 on, sentinels included.
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
