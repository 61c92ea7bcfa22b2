"""A run's batches for any trainer: by index, in slices, in turn, by rank, with their documents."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import shown
from trainer.data.features import Batch
from trainer.data.origins import Document

__all__ = ["Batches", "Document"]

# The positions of later rows would not fit into 64 bits.
_END = 1 << 40
# Feature -> (shape, dtype).
Spec = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


def whole(name: str, value: Any) -> int:
    """Returns a whole number of any type; raises UserError, which calls it `name`, for others."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise UserError(f"{name} is {shown(value)}: it must be a whole number") from error


class Part(Protocol):
    """One of several equal parts of every batch: a host's rows; `k` counts batches from 0."""

    def __getitem__(self, k: int) -> Batch: ...

    def iterate(self, first_step: int, threads: int, prefetch: int) -> Iterator[Batch]:
        """Yields the batches from `first_step` on, endlessly, read ahead."""

    def rows(self, step: int) -> int:
        """Returns the number of rows of a batch."""

    def spec(self, step: int) -> Spec:
        """Returns the shapes and types of a batch's features, without reading data."""


class Law(Protocol):
    """What makes batches: caches that this process reads, or a service."""

    @property
    def config(self) -> dict[str, Any]:
        """The settings on which the batches depend, as JSON values."""

    def batches(self, host: int = 0, hosts: int = 1) -> Part:
        """Returns the rows of one host; raises UserError unless `hosts` divides the batch."""

    def explain(self, k: int, row: int) -> list[Document]:
        """Returns the documents of a row of batch `k`, counted over all hosts."""


class Batches:
    """The batches of a run: `batches[k]` is what update k + 1 reads, a function of its settings.

    A batch maps T5X's names of features to int32 arrays with a row per example or packed row, such
    as `encoder_input_tokens` [rows, inputs] and `decoder_target_tokens`, `decoder_input_tokens` and
    `decoder_loss_weights` [rows, targets]; `spec` lists them. Slices are lists. Iteration begins at
    `state`, the number of batches taken so far, and counts them there; it is all that a checkpoint
    needs. Without `length` the batches are endless. Batches to evaluate on, which come `again`,
    begin with the first in each iteration.

    Any number of processes may read the same batches. Reading raises UserError if the data are
    damaged.
    """

    def __init__(
        self,
        law: Law,
        length: int | None = None,
        threads: int = 1,
        prefetch: int = 4,
        again: bool = False,
    ):
        self.again = again
        self._law, self._length, self._state = law, length, 0
        self._threads, self._prefetch = threads, prefetch
        self._index, self._count = 0, 1
        self._opened: Part | None = None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("these batches are endless: give train_steps")
        return self._length

    @property
    def length(self) -> int | None:
        """The number of batches; None if they are endless."""
        return self._length

    @property
    def config(self) -> dict[str, Any]:
        """The settings on which all batches depend, as JSON values, for `palimpsest.batches`."""
        found = dict(self._law.config)
        if self._length is None:
            found.pop("train_steps", None)
        return found

    @property
    def state(self) -> int:
        """The number of batches taken: the index of the next."""
        return self._state

    @state.setter
    def state(self, taken: int) -> None:
        taken, last = whole("state", taken), self.length_or(_END)
        if not 0 <= taken <= last:
            raise UserError(
                f"state={taken:,}: it must be the number of batches taken, 0 to {last:,}"
            )
        self._state = taken

    def length_or(self, other: int) -> int:
        """Returns the number of batches, or `other` if they are endless."""
        return other if self._length is None else self._length

    @property
    def _part(self) -> Part:
        if self._opened is None:
            self._opened = self._law.batches(self._index, self._count)
        return self._opened

    @property
    def spec(self) -> Spec:
        """Feature -> (shape, dtype) of the next batch; schedules change shapes between batches."""
        return self._part.spec(self._state)

    @property
    def part(self) -> tuple[int, int]:
        """(index of these rows' part, number of parts) of the whole batch."""
        return self._index, self._count

    def shard(self, index: int, count: int) -> "Batches":
        """Returns the same batches with the rows of one of `count` equal parts, as a rank reads.

        The parts in order are the batch. A part can be divided again. Raises UserError unless
        `count` divides the rows, and 0 <= `index` < `count`.
        """
        index, count = whole("index", index), whole("count", count)
        if not 0 <= index < count:
            raise UserError(
                f"shard({index}, {count}): the index must be 0 or more, below the count"
            )
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part._index, part._count = self._index * count + index, self._count * count
        part._opened = self._law.batches(*part.part)
        return part

    def explain(self, k: int, row: int) -> list[Document]:
        """Returns the documents of a row (from 0) of batch `k`, in order.

        Raises UserError if there is no such row or pyarrow is not installed, IndexError if there is
        no such batch.
        """
        k, row = self._place(k), whole("row", row)
        rows = self._part.rows(k)
        if not 0 <= row < rows:
            raise UserError(f"row {row}: the batch has rows 0 to {rows - 1}")
        return self._law.explain(k, self._index * rows + row)

    @overload
    def __getitem__(self, k: int) -> Batch: ...
    @overload
    def __getitem__(self, k: slice) -> list[Batch]: ...
    def __getitem__(self, k: int | slice) -> Batch | list[Batch]:
        if isinstance(k, slice):
            return [self._part[place] for place in self._places(k)]
        return self._part[self._place(k)]

    def _places(self, given: slice) -> Sequence[int]:
        """Returns the indices of a slice, which needs an end if batches are endless."""
        if self._length is None and (given.stop is None or min(given.start or 0, given.stop) < 0):
            raise TypeError("these batches are endless: end the slice, and count from 0")
        return range(self.length_or(given.stop))[given]

    def _place(self, k: int) -> int:
        given = operator.index(k)
        place = given + (self._length or 0) * (given < 0)
        if not 0 <= place < self.length_or(_END):
            raise IndexError(f"batch {given:,}: the batches are {self}")
        return place

    def __iter__(self) -> Iterator[Batch]:
        if self.again:
            self._state = 0
        made = self._part.iterate(self._state, self._threads, self._prefetch)
        left = None if self._length is None else self._length - self._state
        for batch in itertools.islice(made, left):
            self._state += 1
            yield batch

    def __repr__(self) -> str:
        count = "endless" if self._length is None else f"{self._length:,}"
        part = f", part {self._index} of {self._count}" if self._count > 1 else ""
        return f"Batches({self.config['task']}, {count}{part})"
