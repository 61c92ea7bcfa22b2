"""Layouts of block-sparse attention: options of `ModelConfig.attention_pattern`. No JAX.

Source: Zaheer et al. 2020 (arXiv:2007.14062), figure 1; Beltagy et al. 2020 (arXiv:2004.05150),
figure 2; Child et al. 2019 (arXiv:1904.10509), section 4; options from
`deepspeed/ops/sparse_attention/sparsity_config.py`, whose names docs/training.md lists.
Differences: DeepSpeed draws random blocks without a seed, from all blocks, even visited ones;
here the draw is seeded and excludes visited blocks.

Dimensions: P heads with their own layouts, N blocks in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.terminal.flag_fields import Rejected, Rule, above, at_least, check, field
from trainer.model.slot import Part

_ODD = Rule("odd and above 0", lambda value: value > 0 and value % 2 == 1)
_NUMBERS = Rule(
    "numbers joined by +, like 0+5", lambda text: all(word.isdecimal() for word in text.split("+"))
)
_NONE_OR_BLOCKS = Rule(
    "none, or different numbers joined by +, like 0+5",
    lambda text: text == "none" or (_NUMBERS.holds(text) and _differ(text)),
)


def _differ(text: str) -> bool:
    return len({*_numbers(text)}) == len(_numbers(text))


_PER_HEAD = "draw random blocks separately for each head instead of once for all heads"
_SEED = "seed of the random blocks"
_SEEDS = Rule("from 0 to 2^64 - 1", lambda value: 0 <= value < 2**64)


@dataclass(frozen=True)
class _Blocks:
    block: int = field(64, "number of tokens in a block of queries or keys", rule=above(0))


@dataclass(frozen=True)
class Local(_Blocks):
    """Options of a window of neighbouring blocks, Longformer's if there are global blocks."""

    window: int = field(
        3, "blocks of the window: a block and as many before as after it", rule=_ODD
    )
    global_blocks: str = field(
        "none",
        "blocks that see all blocks and are seen by all: indices from 0 joined by +, or none",
        rule=_NONE_OR_BLOCKS,
    )

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        layout_NN = _window(blocks, self.window)
        for number in _numbers(self.global_blocks):
            layout_NN[number : number + 1] = layout_NN[:, number : number + 1] = True
        return layout_NN[None]


@dataclass(frozen=True)
class Dilated(_Blocks):
    """Options for a window with gaps."""

    window: int = field(
        3,
        "number of blocks visited, including the block itself",
        rule=Rule("odd and above 1", lambda value: value > 1 and value % 2 == 1),
    )
    dilation: int = field(2, "distance in blocks between visited blocks", rule=at_least(2))

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        distance_NN = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks)))
        within_NN = distance_NN <= self.window // 2 * self.dilation
        return (within_NN & (distance_NN % self.dilation == 0))[None]


@dataclass(frozen=True)
class BigBird(_Blocks):
    """Options of a window with global and random blocks."""

    window: int = field(
        3, "blocks of the window: a block and as many before as after it", rule=_ODD
    )
    global_blocks: int = field(
        1, "number of blocks at the row's start that see all and are seen by all", rule=at_least(0)
    )
    random_blocks: int = field(1, "further blocks that each block sees", rule=at_least(0))
    per_head: bool = field(False, _PER_HEAD)
    seed: int = field(0, _SEED, rule=_SEEDS)

    def __post_init__(self) -> None:
        _check_draws(self)

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        layout_NN = _window(blocks, self.window)
        layout_NN[: self.global_blocks] = layout_NN[:, : self.global_blocks] = True
        return _with_random(layout_NN, self, num_heads, causal)


@dataclass(frozen=True)
class Fixed(_Blocks):
    """Options of adjacent windows whose last blocks are visible to all blocks."""

    window: int = field(4, "number of blocks in each window", rule=above(0))
    global_blocks: int = field(
        1,
        "number of blocks in each window that all queries see; the last ones in the first head",
        rule=above(0),
    )
    head_patterns: int = field(
        1,
        "different choices of these blocks: the second head takes the blocks before them, and so "
        "on; further heads begin again",
        rule=above(0),
    )
    horizontal: bool = field(False, "let these blocks also see all blocks")

    def __post_init__(self) -> None:
        check(self)  # so that no window or block has length 0
        if self.window % self.global_blocks:
            raise Rejected("global_blocks", self.global_blocks, "a divisor of window")
        if self.head_patterns > self.window // self.global_blocks:
            rule = "at most window / global_blocks"
            raise Rejected("head_patterns", self.head_patterns, rule)

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        layouts, windows_NN = [], _windows(blocks, [self.window])
        for head in range(min(self.head_patterns, num_heads)):
            layout_NN = windows_NN.copy()
            first = self.window - (1 + head) * self.global_blocks
            for start in range(0, blocks, self.window):
                # If the last window is short, use the blocks that it has.
                begin = max(min(start + first, blocks - self.global_blocks), 0)
                of_window = slice(begin, begin + self.global_blocks)
                layout_NN[:, of_window] = True
                if self.horizontal:
                    layout_NN[of_window] = True
            layouts.append(layout_NN)
        if len(layouts) == 1:
            return layouts[0][None]
        return np.stack([layouts[head % len(layouts)] for head in range(num_heads)])


@dataclass(frozen=True)
class Variable(_Blocks):
    """Options of windows of several sizes, with chosen global blocks and random blocks."""

    windows: str = field(
        "4",
        "sizes in blocks of adjacent windows, joined by +; the last size also holds for the rest",
        rule=_NUMBERS,
    )
    global_blocks: str = field(
        "0", "blocks that all see: indices from 0 joined by +, or none", rule=_NONE_OR_BLOCKS
    )
    horizontal: bool = field(False, "let global blocks also see all blocks")
    random_blocks: int = field(0, "further blocks that each block sees", rule=at_least(0))
    per_head: bool = field(False, _PER_HEAD)
    seed: int = field(0, _SEED, rule=_SEEDS)

    def __post_init__(self) -> None:
        check(self)  # so that the numbers can be parsed
        if not all(_numbers(self.windows)):
            raise Rejected("windows", self.windows, "without 0")
        if self.horizontal and not _numbers(self.global_blocks):
            raise Rejected("horizontal", True, "false without global blocks")
        _check_draws(self)

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        layout_NN = _windows(blocks, _numbers(self.windows))
        for number in _numbers(self.global_blocks):
            layout_NN[:, number : number + 1] = True
            if self.horizontal:
                layout_NN[number : number + 1] = True
        return _with_random(layout_NN, self, num_heads, causal)


def _check_draws(options: BigBird | Variable) -> None:
    if options.random_blocks:
        return
    if options.per_head:
        raise Rejected("per_head", True, "false without random blocks")
    if options.seed:
        raise Rejected("seed", options.seed, "left out without random blocks")


def _numbers(text: str) -> list[int]:
    return [] if text == "none" else [int(word) for word in text.split("+")]


def _window(blocks: int, window: int) -> np.ndarray:
    distance_NN = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks)))
    return distance_NN <= window // 2


def _windows(blocks: int, sizes: Sequence[int]) -> np.ndarray:
    """Returns adjacent windows; the last size also holds for the rest."""
    ends = np.cumsum([*sizes, *[sizes[-1]] * blocks])
    window_N = np.searchsorted(ends, np.arange(blocks), side="right")
    return np.equal.outer(window_N, window_N)


def _with_random(
    layout_NN: np.ndarray, options: BigBird | Variable, num_heads: int, causal: bool
) -> np.ndarray:
    """Returns one layout for all heads or one per head, with random blocks added to each row."""
    count, draws = options.random_blocks, num_heads if options.per_head else 1
    layouts = np.repeat(layout_NN[None], draws, axis=0)
    if not count:
        return layouts
    others_NN = ~layout_NN
    if causal:
        others_NN &= np.tri(len(layout_NN), dtype=bool)
    for head, layout in enumerate(layouts):
        # A counter-based generator's raw bits stay the same in all numpy versions.
        bits = np.random.Philox(key=np.array([options.seed, head], np.uint64)).random_raw(
            layout.size
        )
        order_NN = np.argsort(np.where(others_NN, bits.reshape(layout.shape) >> 1, 2**63), axis=1)
        chosen_NN = np.zeros_like(layout)
        np.put_along_axis(chosen_NN, order_NN[:, :count], True, axis=1)
        layout |= chosen_NN & others_NN
    return layouts


def _options(config: Any, options: Any) -> Any:
    return options


BIGBIRD = Part(_options, options=BigBird)
DILATED = Part(_options, options=Dilated)
FIXED = Part(_options, options=Fixed)
LOCAL = Part(_options, options=Local)
VARIABLE = Part(_options, options=Variable)
