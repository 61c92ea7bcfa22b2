"""The order of windows within an epoch, as pure functions."""

from typing import Protocol

import numpy as np

from tasks import noise

# Rounds of grain's Feistel network. Source: grain's own default for shuffling.
_SHUFFLE_ROUNDS = 4


class Order(Protocol):
    """Which window is read at a place of an epoch."""

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        """Returns window indices int64 [W] of ranks (0 to windows - 1) in epochs."""


class GlobalOrder:
    """A permutation of all windows, another one in each epoch."""

    def __init__(self, windows: int, seed: int):
        self._windows, self._seed = windows, seed

    def __call__(self, epochs_W: np.ndarray, ranks_W: np.ndarray) -> np.ndarray:
        from grain.experimental import index_shuffle

        seeds = {int(epoch): self._epoch_seed(int(epoch)) for epoch in np.unique(epochs_W)}
        return np.array(
            [
                index_shuffle(
                    int(rank),
                    max_index=self._windows - 1,
                    seed=seeds[int(epoch)],
                    rounds=_SHUFFLE_ROUNDS,
                )
                for epoch, rank in zip(epochs_W, ranks_W, strict=True)
            ],
            np.int64,
        )

    def _epoch_seed(self, epoch: int) -> int:
        return int(noise.fold_in(noise.fold_in(self._seed, 0x0DE2), epoch) & np.uint64(0xFFFFFFFF))
