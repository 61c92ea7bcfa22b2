"""Hooks through which a part changes a stack and its layers.

Dimensions: B batch, L length, M kept positions, S positions attended to, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array

from trainer.model.arrangements import Sublayer
from trainer.model.dense import Buildable, Shared
from trainer.model.masks import Rows
from trainer.model.mixers import Mixer, View
from trainer.model.norms import NormPlacement

# What attention has stored in `View.watched`, by name.
Watched = dict[str, Any]


class LayerHook:
    """A part's work in a layer; subclasses are frozen dataclasses that define the hooks they need.

    It reads the arrays named in `watches` from `View.watched`. With `reads_memory` the mixer also
    attends to the encoder's states. `products_per_position` is the number of channels multiplied
    other than by kernels.
    """

    watches: tuple[str, ...] = ()
    reads_memory: bool = False

    @property
    def products_per_position(self) -> int:
        return 0

    def view(self, view: View, cross_view: View | None) -> View:
        return view

    def looked_at(self, y_BLD: Array, source: Any, view: View) -> Array:
        """Returns the states that the mixer attends to: `y_BLD`, perhaps with other states."""
        return y_BLD

    def kept(self, watched: Watched, rows: Rows) -> Array | None:
        """Returns the indices [B, M] kept after the mixer, ascending; None means all."""
        return None

    def length_after(self, length: int) -> int:
        """Returns how many of `length` positions are kept after the mixer."""
        return length

    def sublayer(
        self,
        shared: Shared,
        placement: NormPlacement,
        sources: Mapping[str, Any],
        deterministic: bool,
    ) -> Sublayer | None:
        """Returns a sublayer to run before feed-forward; `sources` come from the stack."""
        return None

    def left(self, x_BLD: Array, watched: Watched) -> Any:
        """Returns what the layer leaves for the decoder layer of the same number, if anything."""
        return None

    def finished(self, left: Any, norm: Callable[[Array], Array]) -> Any:
        """Maps `left` after the stack has run; `norm` is the norm of its last states."""
        return left


@dataclass(frozen=True)
class StackPart:
    """A part in every layer of a stack; fields that are None are unused.

    `source` builds a module in the stack, which maps the number of rows to `sources[name]` for
    hooks. `front` builds a module in the model, which lengthens an encoder's embedded tokens and
    rows by `lengthening` positions.
    """

    name: str
    hook: LayerHook | None = None
    source: Buildable | None = None
    front: Buildable | None = None
    lengthening: int = 0
    encoder_only: bool = False

    def layer(self, layer: Any, index: int, count: int) -> Any:
        """Returns the `LayerSpec` of a stack's layer `index`, from 0, of `count`."""
        return layer


class CrossAttention(NamedTuple):
    """A decoder's attention to an encoder: a sublayer of its layers, and hooks in both stacks."""

    mixer: Mixer | None
    encoder: LayerHook | None = None
    decoder: LayerHook | None = None
