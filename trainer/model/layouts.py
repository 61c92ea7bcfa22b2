"""Block-sparse layouts of attention: which blocks of keys each block of queries looks at.

Plain data, no JAX. A pattern is a frozen dataclass of options whose `layout` is bool [P, N, N]: P
is the number of heads if their layouts differ, or else 1; N the number of blocks of a row. Masks
within blocks (causal, packed examples, prefixes, padding) are applied on top of it.

Source: Zaheer et al. 2020 (arXiv:2007.14062), figure 1; Beltagy et al. 2020 (arXiv:2004.05150),
figure 2; Child et al. 2019 (arXiv:1904.10509), section 4; and for the options
`deepspeed/ops/sparse_attention/sparsity_config.py`, whose names docs/training.md gives.
Differences: DeepSpeed draws random blocks without a seed and among all blocks, so that some are
visited anyway; here they come from a seed and are other blocks than those.

Dimensions: P heads with layouts of their own, N blocks of a row, M blocks visited at most, n rows
of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from tasks.terminal.fields import Rejected, Rule, above, at_least, check, field
from trainer.model.options import NoOptions

FULL = "full"
_ODD = Rule("odd and above 0", lambda value: value > 0 and value % 2 == 1)
_NUMBERS = Rule(
    "numbers joined by +, as 0+5", lambda text: all(each.isdecimal() for each in text.split("+"))
)
_NONE_OR_BLOCKS = Rule(
    "none, or different numbers joined by +, as 0+5",
    lambda text: text == "none" or (_NUMBERS.holds(text) and _differ(text)),
)


def _differ(text: str) -> bool:
    numbers = [int(each) for each in text.split("+")]
    return len({*numbers}) == len(numbers)


_PER_HEAD = "draw random blocks for each head; or else one draw serves all"
_SEED = "seed of the random blocks"
_SEEDS = Rule("from 0 to 2^64 - 1", lambda value: 0 <= value < 2**64)


class Pattern(Protocol):
    """The options of a pattern."""

    @property
    def block(self) -> int: ...

    def __hash__(self) -> int: ...

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        """Returns the visited blocks, bool [P, N, N], each block of queries its own among them.

        With `causal`, random blocks are drawn from those before; blocks after are left in, since
        a prefix may see them: `visited` takes them out.
        """
        ...


@dataclass(frozen=True)
class _Blocks:
    block: int = field(64, "tokens of a block of queries or keys", rule=above(0))


@dataclass(frozen=True)
class Local(_Blocks):
    """The options of a window of neighbouring blocks; with global blocks it is Longformer's."""

    window: int = field(
        3, "blocks of the window: a block and as many before as after it", rule=_ODD
    )
    global_blocks: str = field(
        "none",
        "blocks that see all and are seen by all, counted from 0 and joined by +, or none",
        rule=_NONE_OR_BLOCKS,
    )

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        layout_NN = _window(blocks, self.window)
        for each in _numbers(self.global_blocks):
            layout_NN[each : each + 1] = layout_NN[:, each : each + 1] = True
        return layout_NN[None]


@dataclass(frozen=True)
class Dilated(_Blocks):
    """The options of a window with gaps."""

    window: int = field(
        3,
        "blocks visited, one of them the block itself",
        rule=Rule("odd and above 1", lambda value: value > 1 and value % 2 == 1),
    )
    dilation: int = field(2, "distance (blocks) between them", rule=at_least(2))

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        distance_NN = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks)))
        within_NN = distance_NN <= self.window // 2 * self.dilation
        return (within_NN & (distance_NN % self.dilation == 0))[None]


@dataclass(frozen=True)
class BigBird(_Blocks):
    """The options of a window with global and random blocks."""

    window: int = field(
        3, "blocks of the window: a block and as many before as after it", rule=_ODD
    )
    global_blocks: int = field(
        1, "first blocks of the row, which see all and are seen by all", rule=at_least(0)
    )
    random_blocks: int = field(1, "further blocks that each block sees", rule=at_least(0))
    per_head: bool = field(False, _PER_HEAD)
    seed: int = field(0, _SEED, rule=_SEEDS)

    def __post_init__(self) -> None:
        _check_draws(self)

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        layout_NN = _window(blocks, self.window)
        layout_NN[: self.global_blocks] = layout_NN[:, : self.global_blocks] = True
        draws = num_heads if self.per_head else 1
        return _with_random(layout_NN, self.random_blocks, draws, self.seed, causal)


@dataclass(frozen=True)
class Fixed(_Blocks):
    """The options of windows side by side, of each of which the last blocks are seen by all."""

    window: int = field(4, "blocks of each window", rule=above(0))
    global_blocks: int = field(
        1, "blocks of each window that all see: its last ones, in the first head", rule=above(0)
    )
    head_patterns: int = field(
        1,
        "choices of these blocks: the second head takes those before them, and so on; heads "
        "beyond begin anew",
        rule=above(0),
    )
    horizontal: bool = field(False, "let these blocks also see all")

    def __post_init__(self) -> None:
        check(self)  # there is no window or block of length 0
        if self.window % self.global_blocks:
            raise Rejected("global_blocks", self.global_blocks, "a divisor of window")
        if self.head_patterns > self.window // self.global_blocks:
            rule = "at most window / global_blocks"
            raise Rejected("head_patterns", self.head_patterns, rule)

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        starts = range(0, blocks, self.window)
        windows_NN = np.zeros((blocks, blocks), bool)
        for start in starts:
            windows_NN[start : start + self.window, start : start + self.window] = True
        layouts = []
        for head in range(min(self.head_patterns, num_heads)):
            layout_NN = windows_NN.copy()
            first = self.window - (1 + head) * self.global_blocks
            for start in starts:
                # In a short last window those that are there.
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
    """The options of windows of several sizes, with chosen global blocks and random ones."""

    windows: str = field(
        "4",
        "blocks of the windows side by side, joined by +; the last number holds for the rest",
        rule=_NUMBERS,
    )
    global_blocks: str = field(
        "0", "blocks that all see, counted from 0 and joined by +, or none", rule=_NONE_OR_BLOCKS
    )
    horizontal: bool = field(False, "let global blocks also see all")
    random_blocks: int = field(0, "further blocks that each block sees", rule=at_least(0))
    per_head: bool = field(False, _PER_HEAD)
    seed: int = field(0, _SEED, rule=_SEEDS)

    def __post_init__(self) -> None:
        check(self)  # the numbers can be read
        if not all(_numbers(self.windows)):
            raise Rejected("windows", self.windows, "without 0")
        if self.horizontal and not _numbers(self.global_blocks):
            raise Rejected("horizontal", True, "false without global blocks")
        _check_draws(self)

    def layout(self, num_heads: int, blocks: int, causal: bool) -> np.ndarray:
        layout_NN = np.zeros((blocks, blocks), bool)
        start, sizes = 0, _numbers(self.windows)
        while start < blocks:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            layout_NN[start : start + size, start : start + size] = True
            start += size
        for each in _numbers(self.global_blocks):
            layout_NN[:, each : each + 1] = True
            if self.horizontal:
                layout_NN[each : each + 1] = True
        draws = num_heads if self.per_head else 1
        return _with_random(layout_NN, self.random_blocks, draws, self.seed, causal)


PATTERNS: Mapping[str, type] = MappingProxyType(
    {
        "bigbird": BigBird,
        "dilated": Dilated,
        "fixed": Fixed,
        FULL: NoOptions,
        "local": Local,
        "variable": Variable,
    }
)


def _check_draws(options: BigBird | Variable) -> None:
    """Rejects options of random blocks where there are none."""
    if options.random_blocks:
        return
    if options.per_head:
        raise Rejected("per_head", True, "false without random blocks")
    if options.seed:
        raise Rejected("seed", options.seed, "left out without random blocks")


def _numbers(text: str) -> list[int]:
    return [] if text == "none" else [int(each) for each in text.split("+")]


def _window(blocks: int, window: int) -> np.ndarray:
    distance_NN = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks)))
    return distance_NN <= window // 2


def _with_random(
    layout_NN: np.ndarray, count: int, draws: int, seed: int, causal: bool
) -> np.ndarray:
    """Returns `draws` layouts, with `count` blocks more in each row where there are so many."""
    layouts = np.repeat(layout_NN[None], draws, axis=0)
    if not count:
        return layouts
    others_NN = ~layout_NN
    if causal:
        others_NN &= np.tri(len(layout_NN), dtype=bool)
    for head, layout in enumerate(layouts):
        # Bits of a counter-based generator, which no version of numpy changes.
        bits = np.random.Philox(key=np.array([seed, head], np.uint64)).random_raw(layout.size)
        order_NN = np.argsort(np.where(others_NN, bits.reshape(layout.shape) >> 1, 2**63), axis=1)
        chosen_NN = np.zeros_like(layout)
        np.put_along_axis(chosen_NN, order_NN[:, :count], True, axis=1)
        layout |= chosen_NN & others_NN
    return layouts


@lru_cache(maxsize=256)
def visited(
    pattern: Pattern, num_heads: int, length: int, causal: bool, prefix: bool = False
) -> np.ndarray:
    """Returns the blocks to compute, read-only bool [P, N, N].

    Args:
      pattern: the options.
      num_heads: heads of the queries.
      length: tokens of a row; the last block may be part empty.
      causal: a query sees no key after it.
      prefix: but all keys of a prefix, if it is in the prefix.
    """
    layout_PNN = pattern.layout(num_heads, -(-length // pattern.block), causal)
    if causal and not prefix:
        layout_PNN = np.tril(layout_PNN)
    if (layout_PNN == layout_PNN[:1]).all():
        layout_PNN = layout_PNN[:1]
    layout_PNN.flags.writeable = False
    return layout_PNN


def visited_pairs(pattern: Pattern, num_heads: int, length: int, causal: bool) -> float:
    """Returns the pairs of query and key in visited blocks of a row, as a mean over heads."""
    layout_PNN = visited(pattern, num_heads, length, causal)
    blocks = layout_PNN.shape[1]
    size_N = np.minimum(length - pattern.block * np.arange(blocks), pattern.block)
    return float(np.einsum("pqk,q,k->", layout_PNN, size_N, size_N)) / len(layout_PNN)


class Group(NamedTuple):
    """Blocks of queries that visit about as many blocks of keys.

    Attributes:
      query_n: the blocks of queries, int32 [n].
      key_PnM: the blocks of keys that each visits, int32; 0 where it visits fewer than M.
      real_PnM: bool, False there.
    """

    query_n: np.ndarray
    key_PnM: np.ndarray
    real_PnM: np.ndarray


# Padding that is not worth one group more, and the most groups, each of which is compiled.
_WASTE, _GROUPS = 1.05, 8


def groups_of(layout_PNN: np.ndarray) -> list[Group]:
    """Returns the blocks of queries in groups, so that rows with global blocks pad no others."""
    count_N = layout_PNN.sum(axis=2).max(axis=0)
    order_N = np.argsort(count_N, kind="stable")
    groups = []
    for query_n in np.split(order_N, _borders(count_N[order_N])):
        query_n = np.sort(query_n)
        chosen_PnN = layout_PNN[:, query_n]
        most = int(chosen_PnN.sum(axis=2).max())
        # A stable sort puts the visited blocks first, in their order.
        key_PnM = np.argsort(~chosen_PnN, axis=2, kind="stable")[:, :, :most]
        real_PnM = np.take_along_axis(chosen_PnN, key_PnM, axis=2)
        key_PnM = np.where(real_PnM, key_PnM, 0)
        groups.append(Group(query_n.astype(np.int32), key_PnM.astype(np.int32), real_PnM))
    return groups


def _borders(count_N: np.ndarray) -> list[int]:
    """Returns where to cut sorted counts, so that few parts padded to their maxima waste little."""
    ends = [*(np.flatnonzero(np.diff(count_N)) + 1), len(count_N)]
    starts = np.array([0, *ends[:-1]])
    cost_E = np.array([end * count_N[end - 1] for end in ends], float)
    cuts: list[list[int]] = [[] for _ in ends]
    for _ in range(_GROUPS - 1):
        if cost_E[-1] <= _WASTE * count_N.sum():
            break
        parts = []
        for index, end in enumerate(ends):
            # The last part begins after the end of an earlier one.
            last = (end - starts[1 : index + 1]) * count_N[end - 1]
            options = cost_E[:index] + last
            best = int(np.argmin(options)) if index else -1
            better = index and options[best] < cost_E[index]
            parts.append(
                (options[best], [*cuts[best], ends[best]])
                if better
                else (cost_E[index], cuts[index])
            )
        cost_E = np.array([cost for cost, _ in parts])
        cuts = [cut for _, cut in parts]
    return [int(cut) for cut in cuts[-1]]


def picture(pattern: Pattern, blocks: int, causal: bool, head: int = 0) -> str:
    """Returns a layout as text: a line for each block of queries, "#" where it visits keys."""
    layout_PNN = visited(pattern, head + 1, blocks * pattern.block, causal)
    rows = layout_PNN[min(head, len(layout_PNN) - 1)]
    return "\n".join(" ".join("#" if each else "·" for each in row) for row in rows)
