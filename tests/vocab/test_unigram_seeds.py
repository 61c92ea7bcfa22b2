"""Compares seed pieces with a direct count."""

import random
from collections import Counter

import numpy as np

from vocab import unigram_seeds


def by_hand(counts, longest):
    found: Counter[str] = Counter()
    after: dict[str, Counter[str]] = {}
    for word, count in counts.items():
        for start in range(len(word)):
            for stop in range(start + 2, min(len(word), start + longest) + 1):
                piece = word[start:stop]
                found[piece] += count
                after.setdefault(piece, Counter())[word[stop : stop + 1]] += count
    return {
        piece: count
        for piece, count in found.items()
        if count > 1 and (len(after[piece]) > 1 or "" in after[piece])
    }


def test_seeds_are_the_substrings_with_more_than_one_continuation():
    draw = random.Random(0)
    counts = {"▁the": 100, "▁then": 20, "▁return": 50, "▁returns": 5, "世界世界": 3, "x": 9}
    for _ in range(400):
        counts["".join(draw.choices("ab▁ü", k=draw.randint(1, 12)))] = draw.randint(1, 4)
    for longest in (2, 3, 7, 16):
        found = unigram_seeds.seed_pieces(list(counts), np.array(list(counts.values())), longest)
        assert dict(found) == by_hand(counts, longest)
        scores = [count * len(piece) for piece, count in found]
        assert scores == sorted(scores, reverse=True)


def test_the_best_are_kept(monkeypatch):
    monkeypatch.setattr(unigram_seeds, "SEEDS", 1)
    assert unigram_seeds.seed_pieces(["▁the", "in"], np.array([3, 4]), 16) == [("▁the", 3)]
    assert unigram_seeds.seed_pieces(["a"], np.array([3]), 16) == []
