"""Batches as a pure function of the step: `batch k = f(seed, cache, objective, k)`.

Windows are permuted globally, anew each epoch, by grain's stateless `index_shuffle`; noise is keyed
by (seed, epoch, window). The data state of a run is therefore its step, for any number of hosts,
workers or prefetched batches.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from tasks import noise
from tasks.command_line import UserError
from tasks.objectives import Objective
from tasks.vocabulary import TokenIds
from tasks.windows import Windows
from trainer.features import Batch, FeatureConverter

# Rounds of grain's Feistel network. Source: grain's own default for shuffling.
_SHUFFLE_ROUNDS = 4
# Separates the noise of evaluation from that of training under the same seed.
_EVALUATION_EPOCH = 0xFFFF_FFFF


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """Windows -> examples -> features, for given window indices and noise keys."""

    windows: Windows
    objective: Objective
    converter: FeatureConverter
    ids: TokenIds

    def make(self, indices_W: np.ndarray, keys_W: np.ndarray) -> Batch:
        """Returns the features of these windows, one a row."""
        tokens_WN, lengths_W = self.windows.read(indices_W)
        return self.converter(
            self.objective.examples(tokens_WN, lengths_W, keys_W, self.converter.lengths, self.ids)
        )


class TrainingBatches:
    """A random-access, endless sequence of training batches: `batches[k]` is that of step k.

    Host `host` of `hosts` gets its rows of the same global batch of `batch_size` rows.

    Raises:
      UserError: the cache has no full window, or `batch_size` does not divide by `hosts`.
    """

    def __init__(
        self, maker: BatchMaker, batch_size: int, seed: int, host: int = 0, hosts: int = 1
    ):
        if not len(maker.windows):
            raise UserError(
                f"the training split has fewer than {maker.windows.window_tokens} tokens in every "
                "shard, not one window: use more text or shorter lengths"
            )
        if batch_size % hosts:
            raise UserError(f"batch_size {batch_size} does not divide among {hosts} hosts")
        self._maker, self._batch_size, self._seed = maker, batch_size, seed
        rows = batch_size // hosts
        self._rows = np.arange(host * rows, (host + 1) * rows)

    def __len__(self) -> int:
        # What grain asks of a random-access source; no run is as long.
        return 1 << 60

    def __getitem__(self, step: int) -> Batch:
        # Python integers: step * batch_size may pass 2**63 at the far end of `len`.
        positions = [int(step) * self._batch_size + int(row) for row in self._rows]
        epochs_W, indices_W = self.places(positions)
        keys_W = noise.fold_in(noise.fold_in(self._seed, epochs_W), indices_W)
        return self._maker.make(indices_W, keys_W)

    def places(self, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns (epochs int64 [W], windows int64 [W]) of positions in the endless order."""
        from grain.experimental import index_shuffle

        count = len(self._maker.windows)
        epochs = [position // count for position in positions]
        seeds = {epoch: self._epoch_seed(epoch) for epoch in set(epochs)}
        windows = [
            index_shuffle(
                position % count,
                max_index=count - 1,
                seed=seeds[epoch],
                rounds=_SHUFFLE_ROUNDS,
            )
            for position, epoch in zip(positions, epochs, strict=True)
        ]
        return np.array(epochs, np.int64), np.array(windows, np.int64)

    def _epoch_seed(self, epoch: int) -> int:
        return int(noise.fold_in(noise.fold_in(self._seed, 0x0DE2), epoch) & np.uint64(0xFFFFFFFF))

    def iterate(self, first_step: int, threads: int = 2, prefetch: int = 4) -> Iterator[Batch]:
        """Yields the batches of steps first_step, first_step + 1, …, made ahead by threads."""
        import grain

        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
        return iter(grain.MapDataset.source(self)[first_step:].to_iter_dataset(options))


def evaluation_batches(maker: BatchMaker, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yields every window of the split once, in order, with noise fixed by `seed`.

    The last batch is filled up with rows of padding, which carry no loss weight; so the sums over
    the split do not depend on the batch size.
    """
    count = len(maker.windows)
    for first in range(0, count, batch_size):
        indices_W = np.arange(first, min(first + batch_size, count))
        batch = maker.make(
            indices_W, noise.fold_in(noise.fold_in(seed, _EVALUATION_EPOCH), indices_W)
        )
        missing = batch_size - len(indices_W)
        yield {name: np.pad(array, ((0, missing), (0, 0))) for name, array in batch.items()}
