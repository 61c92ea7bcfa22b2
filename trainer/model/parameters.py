"""Parameters and the facts that their modules declare about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec

from trainer.model.parametrisation import UNCHANGED, Initializer, Rates, Start

# A logical axis along which a position uses one entry, which belongs to its expert.
EXPERT_AXIS = "expert"
# Values of `Use.multiplied_per`.
POSITION, SOURCE, ROW = "position", "source", "row"


class Use(NamedTuple):
    """The role of a parameter in the model.

    For counting FLOPs, each element is multiplied once per `multiplied_per`: POSITION, SOURCE (a
    position that attention reads) or ROW; None if it is looked up or added. `exact` parameters are
    used in float32 whatever the model's dtype.
    """

    multiplied_per: str | None
    decays: bool
    exact: bool = False

    @property
    def rounded(self) -> bool:
        return self.multiplied_per is not None and not self.exact


KERNEL = Use(POSITION, decays=True)
SOURCE_KERNEL = Use(SOURCE, decays=True)
ROW_KERNEL = Use(ROW, decays=True)
# Never rounded, such as a router's kernel.
EXACT_KERNEL = Use(POSITION, decays=True, exact=True)
# Kernel of a convolution with one element per channel and step.
TAP = Use(POSITION, decays=False)
# Embeddings, biases and scales.
TABLE = Use(None, decays=False)


class _Declared(nn.LogicallyPartitioned):
    """A parameter in flax's box for logical axes, with additional facts."""

    use: Use = struct.field(default=TABLE, pytree_node=False)
    rates: Rates = struct.field(default=UNCHANGED, pytree_node=False)


def parameter(
    module: nn.Module,
    use: Use,
    name: str,
    initializer: Initializer,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
) -> Array:
    """Returns a parameter of `module`: float32, or in a step the model's dtype if `use.rounded`.

    `use` is KERNEL, TABLE or similar; `axes` are T5X's logical axis names.
    """
    rates = initializer.rates(shape) if isinstance(initializer, Start) else UNCHANGED

    def declared(*arguments: Any) -> _Declared:
        return _Declared(initializer(*arguments), names=axes, use=use, rates=rates)

    return cast(Array, module.param(name, declared, shape, jnp.float32))


@dataclass(frozen=True)
class ParameterFacts:
    """Shape, logical axes, use and learning rates of a parameter."""

    shape: tuple[int, ...]
    axes: PartitionSpec
    use: Use
    rates: Rates = UNCHANGED

    def stacked(self, axis: int, name: str, length: int) -> ParameterFacts:
        """Returns `length` parameters like this one, stacked along a new axis."""
        axes = PartitionSpec(*self.axes[:axis], name, *self.axes[axis:])
        shape = (*self.shape[:axis], length, *self.shape[axis:])
        return replace(self, shape=shape, axes=axes)


def described(boxes: Any) -> Any:
    """Returns a tree of `ParameterFacts` for the boxes that come from `Module.init`."""
    return jax.tree.map(
        lambda box: ParameterFacts(box.value.shape, PartitionSpec(*box.names), box.use, box.rates),
        boxes,
        is_leaf=lambda node: isinstance(node, _Declared),
    )
