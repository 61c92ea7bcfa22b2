"""A scan of layers whose backward pass costs little more than that of unrolled layers.

The results are those of `jax.lax.scan`. That fills the stacks of what its backward pass reads with
zeros before it writes them, and stacks inputs that the layers only read. Here stacks begin without
values on TPUs, and the backward pass reads inputs where they are.

A layer may close over arrays: they become inputs of the scan, and their gradients are summed over
layers. Like most parts of the model, a scan has gradients but no forward-mode derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.tree_util import Partial

from trainer.model.dense import tracing_device

# A flat list of arrays, with None in the place of those without a gradient where it says so.
Leaves = list[Any]


def scan(
    layer: Callable[[Any, Any], tuple[Any, Any]], states: Any, own: Any, length: int
) -> tuple[Any, Any]:
    """Returns `jax.lax.scan(layer, states, own, length)`: the last states and stacked outputs.

    `layer` maps states and its slice of `own`, whose arrays have an axis of layers first, to states
    and outputs.
    """
    closed, shapes = jax.make_jaxpr(layer, return_shape=True)(states, _slice(own))
    count = len(jax.tree.leaves(states))

    def one(shared: Leaves, states: Leaves, own: Leaves) -> tuple[Leaves, Leaves]:
        out = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, shared))(*states, *own)
        return out[:count], out[count:]

    @jax.custom_vjp
    def run(shared: Leaves, states: Leaves, own: Leaves) -> tuple[Leaves, Leaves]:
        return lax.scan(lambda *inputs: one(shared, *inputs), states, own, length)

    def forward(shared: Leaves, states: Leaves, own: Leaves) -> Any:
        return _Taped(one, shared, states, own, length).forward(shared, states, own)

    run.defvjp(forward, lambda backward, gradients: backward(*gradients))
    out = run(closed.consts, jax.tree.leaves(states), jax.tree.leaves(own))
    return jax.tree.unflatten(jax.tree.structure(shapes), [*out[0], *out[1]])


class _Taped:
    """The program of one layer that also returns what the layer's backward pass reads.

    Of that, only `stacked` is kept for each layer: the rest are inputs, or `derived` from inputs
    that all layers share, and computed once more.
    """

    def __init__(self, one: Any, shared: Leaves, states: Leaves, own: Leaves, length: int):
        def taped(*inputs: Leaves) -> tuple[Any, Leaves]:
            def moving(inputs_with_gradients: Sequence[Leaves]) -> tuple[Any, Any]:
                out = one(*map(_merged, inputs_with_gradients, map(_fixed, inputs)))
                return [*map(_moving, out)], [*map(_fixed, out)]

            out, backward, fixed = jax.vjp(moving, [*map(_moving, inputs)], has_aux=True)
            read, self.tree = jax.tree.flatten(backward)
            return [*map(_merged, out, fixed)], read

        closed, out = jax.make_jaxpr(taped, return_shape=True)(shared, states, _slice(own))
        jaxpr, (_, self.output_shapes) = closed.jaxpr, out[0]
        ends = len(states) + len(self.output_shapes)
        self.length, self.closed = length, closed
        self.shared = jaxpr.invars[: len(shared)]
        self.own = jaxpr.invars[len(shared) + len(states) :]
        self.out, self.read = jaxpr.outvars[:ends], jaxpr.outvars[ends:]
        known, self.derivation = _derivable(jaxpr, self.shared)
        variables = dict.fromkeys(each for each in self.read if isinstance(each, Var))
        inputs = {*self.shared, *self.own}
        self.derived = [variable for variable in variables if variable in known - inputs]
        self.stacked = [variable for variable in variables if variable not in known | inputs]

    def forward(self, shared: Leaves, states: Leaves, own: Leaves) -> tuple[Any, Partial]:
        """Returns the scan's results and its backward pass."""
        run = self._program(self.closed.jaxpr.replace(outvars=[*self.out, *self.stacked]))
        stacked = [each.aval for each in self.stacked]
        stacks = [
            _blank((self.length, *each.shape), each.dtype)
            for each in (*self.output_shapes, *stacked)
        ]

        def turn(index: Array, before: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            states, stacks = before
            out = run(*shared, *states, *_at(own, index))
            return out[: len(states)], _put(stacks, index, out[len(states) :])

        states, stacks = lax.fori_loop(0, self.length, turn, (states, stacks))
        outputs, kept = stacks[: len(self.output_shapes)], stacks[len(self.output_shapes) :]
        return (states, outputs), Partial(self._backward, shared, own, kept)

    def _backward(
        self, shared: Leaves, own: Leaves, stacks: Leaves, of_states: Leaves, of_outputs: Leaves
    ) -> tuple[Leaves, Leaves, Leaves]:
        """Returns the gradients of the scan's inputs, None for those that have none."""
        of_outputs = _moving(of_outputs)
        sums = jax.tree.map(jnp.zeros_like, _moving(shared))
        of_own = jax.tree.map(lambda leaf: _blank(leaf.shape, leaf.dtype), _moving(own))

        def turn(done: Array, before: tuple[Leaves, Leaves, Leaves]) -> tuple[Any, Any, Any]:
            sums, of_states, of_own = before
            index = self.length - 1 - done
            backward = self._backward_of(shared, _at(own, index), _at(stacks, index))
            ((more, of_states, each),) = backward([of_states, _at(of_outputs, index)])
            return jax.tree.map(jnp.add, sums, more), of_states, _put(of_own, index, each)

        return lax.fori_loop(0, self.length, turn, (sums, _moving(of_states), of_own))

    def _backward_of(self, shared: Leaves, own: Leaves, stacked: Leaves) -> Callable[..., Any]:
        """Returns the backward pass of one layer."""
        derive = self._program(self.derivation.replace(outvars=self.derived))
        variables = *self.shared, *self.own, *self.stacked, *self.derived
        values = dict(zip(variables, (*shared, *own, *stacked, *derive(*shared)), strict=True))
        read = [
            values[each] if isinstance(each, Var) else jnp.asarray(each.val, each.aval.dtype)
            for each in self.read
        ]
        return jax.tree.unflatten(self.tree, read)

    def _program(self, jaxpr: Jaxpr) -> Callable[..., Leaves]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, self.closed.consts))


def _blank(shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns an array to be written, whose values do not matter."""
    # XLA's compiler for GPUs would give each device of a mesh the whole of `lax.empty`.
    return (lax.empty if tracing_device().is_tpu else jnp.zeros)(shape, dtype)


def _derivable(jaxpr: Jaxpr, shared: Sequence[Var]) -> tuple[set[Var], Jaxpr]:
    """Returns the variables that depend on no other inputs, and the program that computes them."""
    known, equations = {*jaxpr.constvars, *shared}, []
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(isinstance(v, Literal) or v in known for v in eqn.invars):
            known.update(eqn.outvars)
            equations.append(eqn)
    return known, jaxpr.replace(invars=shared, eqns=equations)


def _slice(tree: Any) -> Any:
    """Returns the shapes of one layer's slice."""
    return jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), tree)


def _at(stacks: Leaves, index: Array) -> Leaves:
    take = lax.dynamic_index_in_dim
    return jax.tree.map(
        lambda stack: take(stack, index, keepdims=False, allow_negative_indices=False), stacks
    )


def _put(stacks: Leaves, index: Array, values: Leaves) -> Leaves:
    put = lax.dynamic_update_index_in_dim
    return jax.tree.map(
        lambda stack, value: put(stack, value, index, 0, allow_negative_indices=False),
        stacks,
        values,
    )


def _moving(leaves: Leaves) -> Leaves:
    """Returns the leaves that have gradients, and None for others."""
    return [leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None for leaf in leaves]


def _fixed(leaves: Leaves) -> Leaves:
    return [None if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in leaves]


def _merged(moving: Leaves, fixed: Leaves) -> Leaves:
    return [one if other is None else other for one, other in zip(moving, fixed, strict=True)]
