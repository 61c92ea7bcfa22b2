"""The origins of a batch's rows: the tasks, windows and documents from which they were made."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tasks.cache.lineage import Lineage, Part
from tasks.cache.windows import Place
from tasks.objectives.objective import Slots
from tasks.terminal.command_line import UserError
from trainer.data.batches import Source
from trainer.data.cached_task import CachedTask
from trainer.data.run import Data


class Document(NamedTuple):
    """A part of a document in a row of a batch.

    Attributes:
      task: the task that made the row.
      example: the number of the example in its row, 0 unless rows are packed.
      epoch: the earlier complete passes over the task.
      window: the index of the example's window among the task's windows.
      id: the document's id in its corpus.
      file: the document's file in its corpus; "" if unknown.
      first: the document's tokens before the part.
      tokens: the part's tokens, with the separator at its end.
    """

    task: str
    example: int
    epoch: int
    window: int
    id: str
    file: str
    first: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Row:
    """The origin of an example in a batch: epoch (from 0) and window of its task.

    `key` seeds the noise, `places` locate the window in the cache's shards, and `slot` says how it
    became an example of a packed row.
    """

    task: str
    epoch: int
    window: int
    key: np.uint64
    places: tuple[Place, ...]
    parts: tuple[Part, ...]
    slot: Slots | None = None


class Origins:
    """The origins of the rows of batch `k` (from 0) of a run's data, over all hosts."""

    def __init__(self, data: Data, k: int):
        batches = data.batches()
        self._tasks, self._sources = data.tasks, batches.sources(k)
        rows_E, self._places, self._members = batches.examples(k)
        # Row -> indices of its examples.
        starts = np.searchsorted(rows_E, np.arange(batches.rows(k) + 1))
        self._examples = [range(*pair) for pair in itertools.pairwise(starts.tolist())]
        self._lineages: dict[int, Lineage] = {}

    def __len__(self) -> int:
        return len(self._examples)

    def examples(self, row: int) -> int:
        """Returns the number of examples of a row; raises UserError if there is no such row."""
        if not 0 <= row < len(self):
            raise UserError(f"--row={row}: the batch has rows 0 to {len(self) - 1}")
        return len(self._examples[row])

    def number(self, row: int, example: int = 0) -> int:
        """Returns the index of an example's task; raises UserError if there is no such row."""
        self.examples(row)
        return int(self._places.sources[self._examples[row][example]])

    def source(self, row: int, example: int = 0) -> tuple[Source, CachedTask, Lineage]:
        """Returns an example's source and task, and the documents of the task's windows."""
        number = self.number(row, example)
        task = self._tasks[number]
        if number not in self._lineages:
            self._lineages[number] = Lineage(task.cache, task.manifest, "train")
        return self._sources[number], task, self._lineages[number]

    def row(self, row: int, example: int = 0) -> Row:
        """Returns the origin of an example; raises UserError if there is no such row."""
        source, _, lineage = self.source(row, example)
        index, places = self._examples[row][example], self._places
        epoch, window = (int(values[index]) for values in (places.epochs, places.windows))
        members, place = self._members[index]
        partner = members.partners_E[place]
        key = source.keys(members.epochs_E[[partner]], members.windows_E[[partner]])[0]
        slots = members.slots
        slot = slots and Slots(slots.choices_W[[place]], slots.mirrored_W[[place]])
        where = source.maker.windows.where(window)
        return Row(source.task, epoch, window, key, where, lineage.parts(where), slot)

    def documents(self, row: int) -> Iterator[Document]:
        """Yields the documents in a row; raises UserError if there is no such row."""
        for example in range(self.examples(row)):
            found = self.row(row, example)
            for part in found.parts:
                yield Document(
                    found.task, example, found.epoch, found.window,
                    part.id, part.file, part.first, part.tokens,
                )  # fmt: skip
