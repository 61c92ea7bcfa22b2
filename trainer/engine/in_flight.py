"""A bound on how far the host runs ahead of the device."""

import jax
import jax.numpy as jnp

from trainer.engine.step import TrainState


class InFlight:
    """The update on which the device may still work, while the host prepares the next.

    JAX would queue dozens, and a run that is told to stop would finish them all before it saves.
    """

    def __init__(self) -> None:
        self._newest: jax.Array | None = None

    def add(self, state: TrainState) -> None:
        """Adds the update that makes `state`, and waits for the one before it."""
        # A copy, since the next update overwrites the state.
        before, self._newest = self._newest, jnp.copy(state.step)
        if before is not None:
            before.block_until_ready()
