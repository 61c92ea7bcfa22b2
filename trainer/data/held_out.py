"""Batches of a split that is held out: every window once, always with the same noise."""

import bisect
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.cache.lineage import Lineage
from tasks.terminal.command_line import UserError
from trainer.data.batches import evaluation_batch
from trainer.data.cached import CachedData
from trainer.data.features import Batch
from trainer.data.origins import Document
from trainer.data.prefetching import prefetched
from trainer.data.run_batches import Spec


class HeldOut:
    """The law of a split's batches, task after task, as the trainer evaluates them.

    Rows of zeros, without weight, complete each task's last batch.
    """

    def __init__(self, data: CachedData, split: str, batch_size: int, seed: int):
        self._data, self._split, self.batch_size, self.seed = data, split, batch_size, seed
        self.makers = data.held_out(split)
        counts = [-(-len(maker.windows) // batch_size) for _, maker in self.makers]
        self._begins = [0, *itertools.accumulate(counts)]

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def config(self) -> dict[str, Any]:
        """The settings on which the batches depend, as JSON values."""
        return {**self._data.config, "split": self._split}

    def place(self, k: int) -> tuple[int, int]:
        """Returns (the task's index, the number of the task's batch) of batch `k`."""
        number = bisect.bisect_right(self._begins, k) - 1
        return number, k - self._begins[number]

    def batches(self, host: int = 0, hosts: int = 1) -> "_Part":
        if self.batch_size % hosts:
            raise UserError(f"batch_size {self.batch_size} is not divisible by the {hosts} hosts")
        return _Part(self, host, self.batch_size // hosts)

    def explain(self, k: int, row: int) -> list[Document]:
        """Returns the documents of a row of batch `k`; none for a row that completes it."""
        number, turn = self.place(k)
        task, maker = self.makers[number]
        window = turn * self.batch_size + row
        if window >= len(maker.windows):
            return []
        lineage = Lineage(task.cache, task.manifest, self._split)
        return [
            Document(task.task.name, 0, 0, window, part.id, part.file, part.first, part.tokens)
            for part in lineage.parts(maker.windows.where(window))
        ]


class _Part:
    """One host's rows of the batches."""

    def __init__(self, law: HeldOut, host: int, rows: int):
        self._law, self._rows = law, rows
        self._own = slice(host * rows, (host + 1) * rows)

    def __getitem__(self, k: int) -> Batch:
        number, turn = self._law.place(k)
        law, maker = self._law, self._law.makers[number][1]
        made = evaluation_batch(maker, turn, law.batch_size, law.seed)
        return {name: array[self._own] for name, array in made.items()}

    def iterate(self, first_step: int, threads: int, prefetch: int) -> Iterator[Batch]:
        """Yields the batches from `first_step` on, prefetched by threads."""
        turns = range(first_step, len(self._law))
        return prefetched(self.__getitem__, turns, threads, prefetch)

    def rows(self, step: int) -> int:
        return self._rows

    def spec(self, step: int) -> Spec:
        last = min(step, len(self._law) - 1)
        blank = self._law.makers[self._law.place(last)[0]][1].blank()
        return {
            name: ((self._rows, *row.shape[1:]), np.dtype(row.dtype)) for name, row in blank.items()
        }
