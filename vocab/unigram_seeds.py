"""Makes the seed pieces of a unigram model: frequent substrings of words.

Given words with counts, SentencePiece ignores the counts and makes a whole word a seed only if it
is part of another (MakeSeedSentencePiecesInternal, unigram_model_trainer.cc), which cost 8% of the
bytes per token when measured. So seeds are computed here and passed as `seed_sentencepieces_file`.
"""

import numpy as np

# SentencePiece's default for `seed_sentencepiece_size`.
SEEDS = 1_000_000
_Found = tuple[np.ndarray, np.ndarray, np.ndarray]  # starts, counts, kept, for one length


def seed_pieces(words: list[str], counts: np.ndarray, longest: int) -> list[tuple[str, int]]:
    """Returns (piece, count) of substrings of 2 to `longest` characters, best count * length first.

    Omits substrings that occur once, or are followed by the same character everywhere. `counts` is
    int64[words]; `words` are distinct, and take about 100 bytes of memory per character.
    """
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    text = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    ends = np.repeat(np.cumsum(lengths), lengths)
    weights = np.repeat(counts, lengths)
    # For each length in turn: the start of every substring, its hash, and the index in `found` of
    # its prefix one character shorter. Substrings with equal hashes count as equal.
    starts = np.arange(len(text))
    hashes = text.astype(np.uint64)
    shorter = np.zeros(len(text), np.int64)
    found: list[_Found] = []
    for length in range(2, longest + 2):
        long_enough = np.flatnonzero(ends[starts] - starts >= length)
        starts, shorter = starts[long_enough], shorter[long_enough]
        hashes = hashes[long_enough] * np.uint64(0x9E3779B97F4A7C15) + text[starts + length - 1]
        hashes ^= hashes >> np.uint64(29)
        order = np.argsort(hashes, kind="stable")
        new = np.ones(len(order), bool)
        new[1:] = np.diff(hashes[order]) != 0
        firsts = np.flatnonzero(new)
        if not len(firsts):
            break
        sums = np.add.reduceat(weights[starts[order]], firsts)
        if found:
            # A prefix with the same count is always followed by the same character: drop it.
            prefixes = shorter[order[firsts]]
            redundant = sums == found[-1][1][prefixes]
            found[-1][2][prefixes[redundant]] = False
        frequent = sums > 1
        kept = np.ones(frequent.sum(), bool)
        found.append((starts[order[firsts[frequent]]], sums[frequent], kept))
        sizes = np.diff(np.append(firsts, len(order)))
        number = np.empty(len(order), np.int64)
        number[order] = np.repeat(np.where(frequent, np.cumsum(frequent) - 1, -1), sizes)
        extended = number >= 0
        starts, hashes, shorter = starts[extended], hashes[extended], number[extended]
    return _best(text, found[: longest - 1])


def _best(text: np.ndarray, found: list[_Found]) -> list[tuple[str, int]]:
    """Returns the best `SEEDS` substrings."""
    if not found:
        return []
    lengths = np.concatenate([np.full(kept.sum(), 2 + i) for i, (_, _, kept) in enumerate(found)])
    starts = np.concatenate([starts[kept] for starts, _, kept in found])
    sums = np.concatenate([sums[kept] for _, sums, kept in found])
    best = np.argsort(-sums * lengths, kind="stable")[:SEEDS]
    return [
        (text[start : start + length].tobytes().decode("utf-32-le"), int(count))
        for start, length, count in zip(starts[best], lengths[best], sums[best], strict=True)
    ]
