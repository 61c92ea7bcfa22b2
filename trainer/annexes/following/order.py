"""The order of a run that trains while its caches are being built.

The plan fixes the number and order of shards. A block is a fixed number of consecutive shards; a
window belongs to the block in which it ends, so that later shards affect neither. The first epoch
reads the blocks in the plan's order, permuting the windows of each; by its end all shards are
known, and later epochs have the usual order. A batch's windows thus depend on plan, seed and step,
not on when a shard was finished (docs/decisions/021-train-while-it-builds.md).

Dimensions: W requested windows.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tasks.cache import subset
from tasks.cache.manifest import CacheManifest
from tasks.cache.subset import Take
from tasks.cache.windows import Windows
from trainer.annexes.following import building_cache
from trainer.annexes.following.building_cache import Following
from trainer.annexes.following.options import FollowingConfig
from trainer.data.cached_task import CachedTask
from trainer.data.order import BlockOrder, Order, Reading, no_window, within_block

_SPLIT = "train"


class FollowedOrder(Reading):
    """The order of a cache's windows in a run that may follow its build.

    Only this object adds to `windows`. `following` holds the number of shards per block, in which
    windows are permuted if `shuffled`; `wanted` is the amount taken, None means all; `later` makes
    the order of epochs after the first, once all windows are known.
    """

    def __init__(
        self,
        windows: Windows,
        task: CachedTask,
        following: FollowingConfig,
        shuffled: bool,
        wanted: Take | None,
        seed: int,
        later: Callable[[], Order],
    ):
        self._windows, self._folder, self._manifest = windows, task.cache, task.manifest
        self._following, self._wanted, self._later = task.building, wanted, later
        self._block_shards, self._seed, self._shuffled = following.shards, seed, shuffled
        self._timeout = following.timeout_seconds
        # (first window of each known block, then the number of windows; the order of later
        # epochs, once all windows are known). One value, because threads read both.
        self._state: tuple[np.ndarray, Order | None] = np.zeros(1, np.int64), None
        self._shards, self._held = 0, 0  # in these blocks: shards, and units of `wanted`
        self._growing = threading.Lock()
        self.advance()

    @property
    def windows(self) -> int:  # type: ignore[override]
        if not self.complete:
            assert self._following
            raise self._following.refuse(_SPLIT, self._of)
        return int(self._state[0][-1])

    @property
    def complete(self) -> bool:  # type: ignore[override]
        return self._state[1] is not None

    @property
    def _of(self) -> int:
        return self._manifest.plan.shards[_SPLIT]

    def _border(self, shards: int) -> int:
        """Returns the end of the block that begins after `shards` shards."""
        return min(shards + self._block_shards, self._of)

    def advance(self) -> None:
        """Records newly finished blocks, without waiting."""
        with self._growing:
            if not self.complete and (borders := list(self._finished())):
                self._add_blocks(borders)

    def _finished(self) -> Iterator[int]:
        shards, held = self._shards, self._held
        while shards < self._of:
            border = self._border(shards)
            if self._following and not self._following.look(_SPLIT, border):
                return
            yield border
            if self._wanted:
                added = self._manifest.splits[_SPLIT][shards:border]
                held += subset.held(self._manifest.plan, added, self._wanted.unit)
                if held >= self._wanted.amount:
                    return
            shards = border

    def _add_blocks(self, borders: Sequence[int]) -> None:
        plan, wanted, firsts = self._manifest.plan, self._wanted, self._state[0]
        known = self._manifest.splits[_SPLIT][: borders[-1]]
        added = known[self._shards :]
        # All at once, since each addition copies the counts of all shards.
        self._windows.grow(added)
        ends = [self._windows.ending(border) for border in borders]
        last = borders[-1] == self._of
        if wanted:
            self._held += subset.held(plan, added, wanted.unit)
            if last or self._held >= wanted.amount:
                # Later shards do not affect this count.
                part = CacheManifest(plan, {_SPLIT: known}, {})
                ends[-1] = subset.count(self._windows, self._folder, part, _SPLIT, wanted)
                last = True
                self._windows.keep_first(ends[-1])
        if last and not ends[-1]:
            raise no_window(self._folder, self._windows)
        self._shards = borders[-1]
        # Blocks without wanted windows do not count.
        firsts = np.maximum.accumulate(np.concatenate([firsts, ends]))
        self._state = firsts, self._later() if last else None

    def knows(self, rank: int) -> bool:
        """Returns whether the window at a rank is known, or can become known without waiting."""
        if not self.complete and rank >= self._state[0][-1]:
            self.advance()
        firsts, later = self._state
        return later is not None or rank < int(firsts[-1])

    def wait(self, rank: int, stopping: Callable[[], bool]) -> bool:
        if self.knows(rank):
            return True
        build = self._patient()
        return building_cache.wait(
            self._folder,
            lambda: self.knows(rank),
            lambda: build.missing(_SPLIT, self._border(self._shards)),
            build,
            self._timeout,
            stopping,
        )

    def _patient(self) -> Following:
        """Returns the build; raises a UserError if this run does not wait for it."""
        assert self._following
        if not self._following.patient:
            raise self._following.refuse(_SPLIT, self._border(self._shards))
        return self._following

    def __call__(self, ranks_W: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Implements `order.Reading`: waits for unknown windows, or raises a UserError."""
        highest = int(ranks_W.max(initial=0))
        while not self.knows(highest):
            self._patient().pause()
        firsts, later = self._state
        epochs_W, ranks_W = np.zeros(len(ranks_W), np.int64), ranks_W.astype(np.int64)
        if later is not None:
            epochs_W, ranks_W = np.divmod(ranks_W, firsts[-1])
        windows_W = np.empty(len(ranks_W), np.int64)
        of_first = epochs_W == 0
        windows_W[of_first] = self._in_first(ranks_W[of_first], firsts)
        if later is not None and not of_first.all():
            windows_W[~of_first] = later(epochs_W[~of_first], ranks_W[~of_first])
        return epochs_W, ranks_W, windows_W

    def _in_first(self, ranks_W: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        if not self._shuffled:
            return ranks_W
        windows_W = np.empty(len(ranks_W), np.int64)
        blocks_W = np.searchsorted(firsts, ranks_W, side="right") - 1
        for block in np.unique(blocks_W).tolist():
            some, first = blocks_W == block, int(firsts[block])
            size = int(firsts[block + 1]) - first
            inside_W = ranks_W[some] - first
            windows_W[some] = first + within_block(inside_W, size, self._seed, 0, block)
        return windows_W

    def following(self, epoch: int, rank: int) -> list[tuple[int, int]]:
        """Returns ranges [first, last) of windows: a rank's block and the next one, if known."""
        firsts, later = self._state
        if epoch:
            return later.following(epoch, rank) if isinstance(later, BlockOrder) else []
        block = int(np.searchsorted(firsts, rank, side="right")) - 1
        ends = firsts[block : block + 3].tolist()
        return list(itertools.pairwise(ends))
