"""Batches as a pure function of the step: `batch k = f(seed, mixture, k)`.

A row's position in a run's endless order, which holds batch after batch, determines the task and
how many of its windows precede it (`trainer/data/interleave.py`); that count determines epoch and
window (`trainer/data/order.py`); noise is keyed by (seed, task, epoch, window). A run's data state
is therefore its step, for any number of hosts, workers or prefetched batches.
`trainer.config.phases` says where a batch's rows lie, and which batch a step reads: they differ
after `--data.skip`.

Dimensions: W windows, one per row of a batch.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tasks.cache.windows import Windows
from tasks.document_kind import DocumentKind
from tasks.objectives import Examples, Lengths, Objective, noise
from tasks.objectives.objective import Slots
from tasks.terminal.command_line import UserError
from tasks.vocabulary import PAIR_BORDER, UNK_ID, TokenIds
from trainer.config.phases import Phases
from trainer.data import segments
from trainer.data.epoch_rows import Layout, Members, OneByOne, PairRows
from trainer.data.features import Batch, Converter
from trainer.data.interleave import MixingSchedule
from trainer.data.order import Epochs, NestedOrder, Reading, no_window
from trainer.data.prefetching import prefetched


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """Makes features from windows, given their indices and noise keys.

    `lengths` apply to the examples of packed rows; None means the converter's. If
    `by_document`, a window's documents are segments (`trainer.data.segments`).
    """

    windows: Windows
    objective: Objective
    converter: Converter
    ids: TokenIds
    lengths: Lengths | None = None
    by_document: bool = False

    def make(self, indices_W: np.ndarray, keys_W: np.ndarray) -> Batch:
        """Returns the features of windows, one window per row."""
        if self.by_document:
            return self._segmented(*self.windows.read_documents(indices_W), keys_W)
        return self.converter(self._examples(*self.windows.read(indices_W), keys_W))

    def _examples(
        self, tokens_WN: np.ndarray, lengths_W: np.ndarray, keys_W: np.ndarray
    ) -> Examples:
        return self.objective.examples(tokens_WN, lengths_W, keys_W, self.example_lengths, self.ids)

    def _segmented(
        self,
        tokens_WN: np.ndarray,
        lengths_W: np.ndarray,
        documents_WN: np.ndarray,
        keys_W: np.ndarray,
    ) -> Batch:
        make = functools.partial(self._examples, lengths_W=lengths_W, keys_W=keys_W)
        made = make(tokens_WN)
        found = segments.documents_of(make, made, documents_WN, lengths_W, self.ids)
        return segments.segmented(self.converter(made), found, self.converter)

    def make_packed(self, members: Members, keys_E: np.ndarray, rows: int) -> Batch:
        """Returns the features of packed rows, given the keys of all examples."""
        tokens_EN, lengths_E = self.windows.read(members.windows_E)
        slots = members.slots or Slots(np.zeros_like(members.rows_E), np.zeros(len(keys_E), bool))
        examples = self.objective.packed_examples(
            tokens_EN, lengths_E, keys_E[members.partners_E], slots, self.example_lengths, self.ids
        )
        return self.converter.packed(examples, members.rows_E, rows)

    @property
    def example_lengths(self) -> Lengths:
        """Lengths of an example."""
        return self.lengths or self.converter.lengths

    def blank(self) -> Batch:
        """Returns the features of one window of unknown tokens, without reading data."""
        tokens_WN = np.full((1, self.windows.window_tokens), UNK_ID, np.int32)
        if self.objective.unit is DocumentKind.PAIR:
            tokens_WN = np.array([[UNK_ID, PAIR_BORDER, UNK_ID]], np.int32)
        sizes, keys = np.array([tokens_WN.size]), np.zeros(1, np.uint64)
        if self.by_document:
            return self._segmented(tokens_WN, sizes, np.zeros_like(tokens_WN), keys)
        made = self._examples(tokens_WN, sizes, keys)
        if self.lengths is not None:
            return self.converter.packed(made, np.zeros(1, np.int64), 1)
        return self.converter(made)


@dataclasses.dataclass(frozen=True)
class Source:
    """A task of a run, with the maker and order of its rows; `packed` lays out packed rows."""

    task: str
    maker: BatchMaker
    reading: Reading
    seed: int
    packed: Layout | None = None
    # The latest request, kept so that each block is prefetched once.
    _asked_for: list[list[tuple[int, int]]] = dataclasses.field(
        default_factory=list, init=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.whole and not len(self.maker.windows):
            raise no_window(self.task, self.maker.windows)

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of windows in rows."""
        return self.packed or OneByOne(self.reading)

    @property
    def tokens_a_row(self) -> float:
        """The mean number of corpus tokens in a row."""
        windows = self.maker.windows
        count = len(windows) / self.packed.rows_per_epoch if self.packed else 1.0
        return windows.mean_tokens * count

    @property
    def whole(self) -> bool:
        """True if all windows are known; False while the cache is being built."""
        return self.reading.complete

    def batch(self, members: Members, rows: int) -> Batch:
        """Returns the features of `rows` rows, given their examples."""
        keys_E = self.keys(members.epochs_E, members.windows_E)
        if self.packed is None:
            return self.maker.make(members.windows_E, keys_E)
        return self.maker.make_packed(members, keys_E, rows)

    def keys(self, epochs_W: np.ndarray, windows_W: np.ndarray) -> np.ndarray:
        """Returns the noise keys of windows in epochs, uint64 [W]."""
        return noise.training_keys(self.seed, self.task, epochs_W, windows_W)

    def read_ahead(self, epoch: int, rank: int) -> None:
        """Prefetches a remote cache's shards before their block is read."""
        ahead = self.packed if isinstance(self.packed, PairRows) else self.reading
        coming = ahead.following(epoch, rank)
        if coming and coming not in self._asked_for:
            self._asked_for[:] = [coming]
            self.maker.windows.prefetch(coming)


class Places(NamedTuple):
    """Origins of a batch's examples in row order; all are int64 [E].

    `sources` indexes the run's sources, `windows` the source's `Windows`; `epochs` counts earlier
    passes over the source, `ranks` windows read earlier in the same epoch.
    """

    sources: np.ndarray
    epochs: np.ndarray
    ranks: np.ndarray
    windows: np.ndarray


class TrainingBatches:
    """Training batches: `batches[k]` holds the rows of step k that host `host` of `hosts` makes.

    Endless. `phases` counts the rows of all hosts; raises UserError unless `hosts` divides them.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        phases: Phases,
        schedule: MixingSchedule | None = None,
        host: int = 0,
        hosts: int = 1,
        later: Sequence[Sequence[Source]] = (),
    ):
        for size in phases.sizes:
            if size % hosts:
                raise UserError(f"batch_size {size} is not divisible by the {hosts} hosts")
        self._schedule = schedule or MixingSchedule([(0, [1.0] * len(sources))])
        self._phases, self._begins = phases, [each.begin for each in phases.stages]
        self._stages = [(tuple(sources), np.zeros(len(sources), np.int64))]
        for begin, following in zip(self._begins[1:], later, strict=True):
            read_S = self._schedule.counts(phases.passed(begin))
            sources, shifts_S = self._stages[-1]
            firsts = [
                _first_untouched(old, new, rank)
                for old, new, rank in zip(
                    sources, following, (read_S + shifts_S).tolist(), strict=True
                )
            ]
            self._stages.append((tuple(following), np.array(firsts, np.int64) - read_S))
        self._host, self._hosts = host, hosts
        # One row of each feature of any source. Sources may lack only the prefix with bidirectional
        # attention, where zeros mean no prefix.
        blanks = [[source.maker.blank() for source in stage] for stage, _ in self._stages]
        self._features = [
            {name: row for blank in stage for name, row in blank.items()} for stage in blanks
        ]

    def places(self, step: int) -> Places:
        """Returns the origins of this host's rows of batch `step`."""
        return self.examples(step)[1]

    def examples(self, step: int) -> tuple[np.ndarray, Places, list[tuple[Members, int]]]:
        """Returns (each example's row, int64 [E]; origins; its members and index among them)."""
        columns, members_of = [], []
        for number, rows, members in self._members(step):
            count = len(members.rows_E)
            origins = (np.full(count, number), members.epochs_E, members.ranks_E, members.windows_E)
            columns.append(np.stack([rows[members.rows_E], *origins]))
            members_of += [(members, place) for place in range(count)]
        joined = np.concatenate(columns, axis=1)
        order_E = np.argsort(joined[0], kind="stable")
        rows_E, *origins_E = joined[:, order_E]
        return rows_E, Places(*origins_E), [members_of[place] for place in order_E.tolist()]

    def last_windows(self, step: int) -> Iterator[tuple[Source, int]]:
        """Yields (source, highest rank of a window that batch `step` needs), over all hosts."""
        sources_W, ranks_W = self._schedule.places(*self._range(step))
        sources = self.sources(step)
        for number in np.unique(sources_W).tolist():
            source = sources[number]
            yield source, source.layout.last_window(int(ranks_W[sources_W == number].max()))

    def sources(self, step: int) -> tuple[Source, ...]:
        """Returns the sources of batch `step`: each length has its own, of the same tasks."""
        return self._stages[self._stage(step)][0]

    def _stage(self, step: int) -> int:
        batch = self._phases.skips.batch(int(step) + 1)
        return bisect.bisect_left(self._begins, batch) - 1

    def rows(self, step: int) -> int:
        """Returns the number of rows that this host makes of batch `step`."""
        return self._range(step)[1] // self._hosts

    def _range(self, step: int) -> tuple[int, int]:
        """Returns (position in the endless order of the first row that a step reads, rows)."""
        batch = self._phases.skips.batch(int(step) + 1)
        return self._phases.passed(batch - 1), self._phases.of(batch).rows

    def _members(self, step: int) -> Iterator[tuple[int, np.ndarray, Members]]:
        """Yields (source, its rows of the batch, the examples of these rows)."""
        first, count = self._range(step)[0], self.rows(step)
        sources_W, ranks_W = self._schedule.places(first + self._host * count, count)
        sources, shifts_S = self._stages[self._stage(step)]
        for number in np.unique(sources_W).tolist():
            rows = np.flatnonzero(sources_W == number)
            members = sources[number].layout.members(ranks_W[rows] + shifts_S[number])
            yield number, rows, members

    def __getitem__(self, step: int) -> Batch:
        sources = self.sources(step)
        batch = {name: np.zeros(*shape) for name, shape in self.spec(step).items()}
        for number, rows, members in self._members(step):
            source = sources[number]
            source.read_ahead(int(members.epochs_E[-1]), int(members.ranks_E[-1]))
            made = source.batch(members, len(rows))
            if len(sources) == 1:
                return made
            for name, array in made.items():
                batch[name][rows] = array
        return batch

    def spec(self, step: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns the shape and type of each feature of batch `step`, without reading data."""
        size, features = self.rows(step), self._features[self._stage(step)]
        return {name: ((size, *row.shape[1:]), row.dtype) for name, row in features.items()}

    def iterate(self, first_step: int, threads: int = 1, prefetch: int = 4) -> Iterator[Batch]:
        """Yields the batches from `first_step` on, prefetched by threads."""
        return prefetched(self.__getitem__, itertools.count(first_step), threads, prefetch)


def _first_untouched(before: Source, after: Source, rank: int) -> int:
    """Returns the first rank of a source from which no token was read in the epoch before `rank`.

    Both sources are of one task with other lengths; `rank` is the first that `before` leaves.
    """
    old, new = (each.reading.order for each in (before, after) if isinstance(each.reading, Epochs))
    assert isinstance(old, NestedOrder)
    assert isinstance(new, NestedOrder)
    return new.begin(old.untouched(rank))


def evaluation_batches(maker: BatchMaker, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yields every window once, in order; padding rows without weight complete the last batch.

    Noise depends only on `seed` and the window, so that evaluations of all steps compare.
    """
    for number in range(-(-len(maker.windows) // batch_size)):
        yield evaluation_batch(maker, number, batch_size, seed)


def evaluation_batch(maker: BatchMaker, number: int, batch_size: int, seed: int) -> Batch:
    """Returns one of `evaluation_batches`."""
    first = number * batch_size
    indices_W = np.arange(first, min(first + batch_size, len(maker.windows)))
    return pad_rows(maker.make(indices_W, noise.evaluation_keys(seed, indices_W)), batch_size)


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Appends rows of zeros to a batch up to `rows` rows."""
    return {
        name: np.pad(array, ((0, rows - len(array)), *((0, 0),) * (array.ndim - 1)))
        for name, array in batch.items()
    }
