"""Hooks through which a part reaches into a stack and its layers.

Dimensions: B batch, L length, M positions that are left, S positions looked at, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
from flax import linen as nn

from trainer.model.arrangements import Sublayer
from trainer.model.dense import Shared
from trainer.model.masks import Rows
from trainer.model.mixers import Mixer, View
from trainer.model.norms import NormPlacement

# What attention has left in `View.watched`, by name.
Watched = dict[str, Any]


class LayerHook:
    """What a part does in a layer. A subclass, a frozen dataclass, defines the hooks it needs.

    Attributes:
      watches: names in `View.watched` that it reads.
      reads_memory: the mixer looks at the encoder's states, too.
      products_per_position: channels multiplied at each position, beside those of kernels.
    """

    watches: tuple[str, ...] = ()
    reads_memory: bool = False

    @property
    def products_per_position(self) -> int:
        return 0

    def view(self, view: View, cross_view: View | None) -> View:
        """Returns the view of the mixer."""
        return view

    def looked_at(self, y_BLD: jax.Array, source: Any, view: View) -> jax.Array:
        """Returns the states at which the mixer looks, `y_BLD` or more."""
        return y_BLD

    def kept(self, watched: Watched, rows: Rows) -> jax.Array | None:
        """Returns the indices [B, M] that are left after the mixer, ascending; None: all."""
        return None

    def length_after(self, length: int) -> int:
        """Returns the positions that are left of `length` after the mixer."""
        return length

    def sublayer(
        self,
        shared: Shared,
        placement: NormPlacement,
        sources: Mapping[str, Any],
        deterministic: bool,
    ) -> Sublayer | None:
        """Returns a sublayer before the feed-forward one; `sources` are those of the stack."""
        return None

    def left(self, x_BLD: jax.Array, watched: Watched) -> Any:
        """Returns what the layer leaves for the decoder's layer of its number; None: nothing."""
        return None

    def finished(self, left: Any, norm: Callable[[jax.Array], jax.Array]) -> Any:
        """Returns what was `left` after the stack; `norm` is that of its last states."""
        return left


class Source(Protocol):
    """Frozen data that builds a module of the stack."""

    def build(self, shared: Shared, name: str) -> nn.Module: ...


class Front(Protocol):
    """Frozen data that builds a module of the model."""

    def build(self, shared: Shared) -> nn.Module: ...


@dataclass(frozen=True)
class StackPart:
    """A part of a stack, in every layer of it.

    Attributes:
      name: the name of its module.
      hook: what it does in each layer; None: nothing.
      source: builds a module of the stack that maps the number of rows to what hooks read as
        `sources[name]`; None: there is none.
      front: builds a module of the model that maps an encoder's embedded tokens and rows to
        longer ones; None: there is none.
      lengthening: positions that `front` adds.
      encoder_only: a decoder does without it.
    """

    name: str
    hook: LayerHook | None = None
    source: Source | None = None
    front: Front | None = None
    lengthening: int = 0
    encoder_only: bool = False


class CrossAttention(NamedTuple):
    """The way in which a decoder looks at an encoder.

    Attributes:
      mixer: a sublayer of the decoder's layers; None: there is none.
      encoder: what it does in the encoder's layers.
      decoder: what it does in the decoder's.
    """

    mixer: Mixer | None
    encoder: LayerHook | None = None
    decoder: LayerHook | None = None
