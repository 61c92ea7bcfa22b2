"""Parameters, each with the facts that its module declares of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import PartitionSpec

from trainer.model.parametrisation import UNCHANGED, Initializer, Rates, Start

# A logical axis along which a position meets one entry only: that of its expert.
EXPERT_AXIS = "expert"
# Values of `Use.multiplied_per`.
POSITION, SOURCE, ROW = "position", "source", "row"


class Use(NamedTuple):
    """The use of a parameter in the model.

    Attributes:
      multiplied_per: what each element is multiplied once for: POSITION, SOURCE (a position that
        attention looks at), ROW, or None if it is looked up or added. FLOPs are counted from it.
      decays: weight decay applies to it, unless a configuration says otherwise.
      exact: it is used in float32 whatever the model's dtype is.
    """

    multiplied_per: str | None
    decays: bool
    exact: bool = False

    @property
    def rounded(self) -> bool:
        """True if every use of it is rounded to the model's dtype."""
        return self.multiplied_per is not None and not self.exact


KERNEL = Use(POSITION, decays=True)
SOURCE_KERNEL = Use(SOURCE, decays=True)
ROW_KERNEL = Use(ROW, decays=True)
# Never rounded, as the kernel of a router.
EXACT_KERNEL = Use(POSITION, decays=True, exact=True)
# A kernel of a convolution with one element for each channel and step.
TAP = Use(POSITION, decays=False)
# Embeddings, biases and scales.
TABLE = Use(None, decays=False)


class _Declared(nn.LogicallyPartitioned):
    """A parameter in the box in which flax carries its logical axes, with other facts about it."""

    use: Use = struct.field(default=TABLE, pytree_node=False)
    rates: Rates = struct.field(default=UNCHANGED, pytree_node=False)


def parameter(
    module: nn.Module,
    use: Use,
    name: str,
    initializer: Initializer,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
) -> jax.Array:
    """Returns a parameter of `module`: float32, or in a step, if `use.rounded`, the model's dtype.

    Args:
      use: what the module does with it, such as KERNEL or TABLE.
      axes: T5X's logical name of each of its axes.
    """
    rates = initializer.rates(shape) if isinstance(initializer, Start) else UNCHANGED

    def declared(*arguments: Any) -> _Declared:
        return _Declared(initializer(*arguments), names=axes, use=use, rates=rates)

    return cast(jax.Array, module.param(name, declared, shape, jnp.float32))


@dataclass(frozen=True)
class ParameterFacts:
    """Shape, logical axes, use and learning rates of a parameter."""

    shape: tuple[int, ...]
    axes: PartitionSpec
    use: Use
    rates: Rates = UNCHANGED

    def stacked(self, axis: int, name: str, length: int) -> ParameterFacts:
        """Returns `length` parameters like this one joined along a new axis."""
        axes = PartitionSpec(*self.axes[:axis], name, *self.axes[axis:])
        shape = (*self.shape[:axis], length, *self.shape[axis:])
        return replace(self, shape=shape, axes=axes)


def described(boxes: Any) -> Any:
    """Returns a tree of `ParameterFacts` from the tree of boxes that `Module.init` returns."""
    return jax.tree.map(
        lambda box: ParameterFacts(box.value.shape, PartitionSpec(*box.names), box.use, box.rates),
        boxes,
        is_leaf=lambda node: isinstance(node, _Declared),
    )
