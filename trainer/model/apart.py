"""Computing the arrays of a tree apart, so that XLA compiles a few small programs.

One program for all arrays of a model's initial state takes XLA longer to compile than the training
step, as its time grows with the number of random draws. Arrays of the same shape and distribution
differ in their seeds alone, and share a program that takes the seeds as inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

Tree = Any
# Primitives whose integer literals are seeds.
_SEEDED = ("random_seed", "random_fold_in")
# What distinguishes a program -> the program; shared by all trees of a process.
_PROGRAMS: dict[Any, Callable[..., jax.Array]] = {}
_MOST_PROGRAMS = 4096


class Apart:
    """A traced function without arguments, whose arrays are computed one by one.

    `shapes` is the tree of its results' shapes and dtypes. Values are those of the jitted function.
    `compiler_options` are `jax.jit`'s.
    """

    def __init__(
        self, function: Callable[[], Tree], compiler_options: Mapping[str, Any] | None = None
    ):
        self._options = dict(compiler_options or {})
        self._closed, self.shapes = jax.make_jaxpr(function, return_shape=True)()
        jaxpr = self._closed.jaxpr
        self._constants = dict(zip(jaxpr.constvars, self._closed.consts, strict=True))
        self._producers = {
            out: number for number, equation in enumerate(jaxpr.eqns) for out in equation.outvars
        }

    def __call__(self, shardings: Tree = None) -> Tree:
        """Computes the arrays, each with its sharding; none is ever whole on one device."""
        outs = self._closed.jaxpr.outvars
        each = [None] * len(outs) if shardings is None else jax.tree.leaves(shardings)
        leaves = [self._computed(*pair) for pair in zip(outs, each, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)

    def _computed(self, out: Var | Literal, sharding: Any) -> jax.Array:
        equations = self._needed(out)
        key = sharding, *self._options.items(), _description(out, equations)
        if key not in _PROGRAMS:
            if len(_PROGRAMS) == _MOST_PROGRAMS:
                _PROGRAMS.clear()
            _PROGRAMS[key] = jax.jit(
                self._program(out, equations),
                out_shardings=sharding,
                compiler_options=self._options,
            )
        constants = [self._constants[each] for each in self._read(out, equations)]
        seeds = [np.asarray(seed.val, seed.aval.dtype) for seed in _seeds(equations)]
        return _PROGRAMS[key](*constants, *seeds)

    def _needed(self, out: Var | Literal) -> list[JaxprEqn]:
        """Returns the equations from which `out` is computed, in their order."""
        needed, waiting = set(), [out]
        while waiting:
            variable = waiting.pop()
            number = None if isinstance(variable, Literal) else self._producers.get(variable)
            if number is not None and number not in needed:
                needed.add(number)
                waiting += self._closed.jaxpr.eqns[number].invars
        return [self._closed.jaxpr.eqns[number] for number in sorted(needed)]

    def _read(self, out: Var | Literal, equations: Sequence[JaxprEqn]) -> list[Var]:
        """Returns the constants that the equations read, in the order in which they do."""
        read = [*(invar for equation in equations for invar in equation.invars), out]
        own = dict.fromkeys(each for each in read if not isinstance(each, Literal))
        return [each for each in own if each in self._constants]

    def _program(
        self, out: Var | Literal, equations: Sequence[JaxprEqn]
    ) -> Callable[..., jax.Array]:
        """Returns the function of the constants and seeds that computes `out`."""
        constants, seeds, seeded = self._read(out, equations), [], []
        for equation in equations:
            invars = [Var(v.aval) if _is_seed(equation, v) else v for v in equation.invars]
            seeds += [new for new, v in zip(invars, equation.invars, strict=True) if new is not v]
            seeded.append(equation.replace(invars=invars))
        jaxpr = self._closed.jaxpr.replace(
            constvars=[], invars=[*constants, *seeds], outvars=[out], eqns=seeded
        )
        run = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))

        def initial_array(*inputs: Any) -> jax.Array:
            (array,) = run(*inputs)
            return array

        return initial_array


def _description(out: Var | Literal, equations: Sequence[JaxprEqn]) -> tuple[Any, ...]:
    """Returns what distinguishes the program of `out` from others: all but seeds and constants."""
    places: dict[Var, int] = {}

    def of(value: Var | Literal) -> Any:
        if isinstance(value, Literal):
            return np.asarray(value.val).tobytes(), value.aval
        return places.setdefault(value, len(places)), value.aval

    described = tuple(
        (
            equation.primitive,
            tuple((name, _Same(value)) for name, value in sorted(equation.params.items())),
            tuple(v.aval if _is_seed(equation, v) else of(v) for v in equation.invars),
            tuple(of(v) for v in equation.outvars),
        )
        for equation in equations
    )
    return described, of(out)


class _Same:
    """A parameter of an equation as a part of a key; an unhashable one is equal to itself only."""

    def __init__(self, value: Any):
        self._value = value
        try:
            self._hash = hash(value)
        except TypeError:
            self._hash = 0

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        return self._value is other._value or bool(self._hash and self._value == other._value)


def _is_seed(equation: JaxprEqn, value: Var | Literal) -> bool:
    return isinstance(value, Literal) and equation.primitive.name in _SEEDED


def _seeds(equations: Sequence[JaxprEqn]) -> list[Any]:
    return [v for equation in equations for v in equation.invars if _is_seed(equation, v)]
