"""The trainable parameters of a run: all, some selected by name, or LoRA's besides fixed ones.

In trees of trainable parameters, optax's `MaskedNode`, which has no leaves, replaces fixed
parameters: these get neither gradients nor optimizer state.

Dimensions: D inputs of a kernel, F its outputs, R rank.
"""

import math
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from tasks.terminal.command_line import UserError
from trainer.config import Config
from trainer.config.lora import LORA
from trainer.model.parameters import KERNEL, ParameterFacts
from trainer.model.paths import named, path_name
from trainer.model.spec import EncoderSpec, ModelSpec
from trainer.model.transformer import parameter_tree
from trainer.optim.optimizer import make_optimizer
from trainer.optim.stacked import STACK_AXES

Tree = Any


class Tuning:
    """The trainable parameters of a run, and their optimizer; `axes` include LoRA's."""

    def __init__(self, config: Config, spec: ModelSpec | EncoderSpec):
        self._config, self._lora = config, config.lora
        facts = parameter_tree(spec)
        self._kernels: dict[str, ParameterFacts] = {}
        if self._lora.rank is not None:
            self._kernels = _matching(named(facts), self._lora.pattern, "--lora.kernels")
            facts = {**facts, LORA: _nested(self._kernels, self._added)}
        self._facts = facts
        self.axes = jax.tree.map(lambda each: each.axes, facts)
        paths = named(facts).keys()
        chosen = {*paths}
        if config.trainable is not None or self._kernels:
            chosen = {path for path in paths if path.startswith(f"{LORA}/")}
            if config.trainable is not None:
                own = {path: None for path in paths if path not in chosen}
                chosen |= _matching(own, config.trainable, "--trainable").keys()
        self._learns = {path: path in chosen for path in paths}
        self.all_learn = all(self._learns.values())

    @property
    def adds(self) -> bool:
        """True if the run adds parameters to the model's own."""
        return bool(self._kernels)

    def optimizer(self) -> optax.GradientTransformation:
        """Returns the trainable parameters' optimizer, which takes trees of all parameters."""
        config = self._config
        inner = make_optimizer(
            config.optimizer,
            self.axes,
            self.learned(jax.tree.map(lambda each: each.use.decays, self._facts)),
            self._facts,
            config.plateau.metric is not None,
        )
        if self.all_learn:
            return inner

        def update(gradients: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
            return inner.update(gradients, state, self.learned(params))

        return optax.GradientTransformation(lambda params: inner.init(self.learned(params)), update)

    def begun(self, params: Tree, seed: int) -> Tree:
        """Returns the model's own parameters with LoRA's initial ones: A is drawn, B is 0."""
        if not self._kernels:
            return params

        def initial(path: str, facts: ParameterFacts) -> dict[str, jax.Array]:
            a, b = self._added(path, facts).values()
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
            spread = facts.shape[0] ** -0.5
            return {
                "a": spread * jax.random.normal(key, a.shape, jnp.float32),
                "b": jnp.zeros(b.shape, jnp.float32),
            }

        return {**params, LORA: _nested(self._kernels, initial)}

    def merged(self, params: Tree) -> Tree:
        """Returns the model's own parameters, with LoRA's products added to their kernels."""
        if not self._kernels:
            return params
        own = {name: tree for name, tree in params.items() if name != LORA}
        added = named(params[LORA])

        def summed(path: tuple, param: jax.Array) -> jax.Array:
            name = path_name(path)
            if name not in self._kernels:
                return param
            # Any axes between the first and the last index the layers.
            product = jnp.einsum("d...r,r...f->d...f", added[f"{name}/a"], added[f"{name}/b"])
            return param + self._lora.scale * product

        return jax.tree_util.tree_map_with_path(summed, own)

    def learned(self, tree: Tree) -> Tree:
        """Returns a tree of all parameters with fixed ones masked."""
        return tree if self.all_learn else self._masked(tree, True)

    def fixed(self, tree: Tree) -> Tree:
        """Returns a tree of all parameters with trainable ones masked."""
        return self._masked(tree, False)

    def joined(self, learned: Tree, fixed: Tree) -> Tree:
        """Merges the trees `learned` and `fixed`."""
        return jax.tree.map(
            lambda one, other: other if isinstance(one, optax.MaskedNode) else one,
            learned,
            fixed,
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )

    def updated(self, params: Tree, updates: Tree) -> Tree:
        """Returns all parameters after `updates`, a tree of trainable ones."""
        if self.all_learn:
            return optax.apply_updates(params, updates)
        learned = optax.apply_updates(self.learned(params), updates)
        return self.joined(learned, self.fixed(params))

    def describe(self) -> list[tuple[str, str]]:
        """Returns a (subject, text) line if some parameters are fixed."""
        if self.all_learn:
            return []
        sizes = {path: math.prod(facts.shape) for path, facts in named(self._facts).items()}
        learning = sum(size for path, size in sizes.items() if self._learns[path])
        total = sum(size for path, size in sizes.items() if not path.startswith(f"{LORA}/"))
        what = f"{sum(self._learns.values())} arrays selected by --trainable"
        if self._kernels:
            what = f"LoRA of rank {self._lora.rank} on {len(self._kernels)} kernels"
            what += " and arrays of --trainable" if self._config.trainable is not None else ""
        return [("learning", f"{what}: {learning:,} parameters beside {total:,} of the model")]

    def _masked(self, tree: Tree, kept: bool) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                leaf if self._learns[path_name(path)] == kept else optax.MaskedNode()
            ),
            tree,
            # Other nodes, such as PartitionSpecs, are trees themselves.
            is_leaf=lambda node: not isinstance(node, dict),
        )

    def _added(self, path: str, facts: ParameterFacts) -> dict[str, ParameterFacts]:
        """Returns the facts of a kernel's A and B; raises a UserError if it is not a matrix."""
        middle = tuple(facts.axes[1:-1])
        if len(facts.shape) < 2 or any(name not in STACK_AXES for name in middle):
            raise UserError(
                f"--lora.kernels={self._lora.pattern}: {path} of shape {facts.shape} is not a "
                "matrix, or has one for each expert: choose others"
            )
        rank = self._lora.rank or 0
        first, *between, last = facts.shape
        a = PartitionSpec(facts.axes[0], *middle, None)
        b = PartitionSpec(None, *middle, facts.axes[-1])
        return {
            "a": ParameterFacts((first, *between, rank), a, KERNEL),
            "b": ParameterFacts((rank, *between, last), b, KERNEL),
        }


def _matching(paths: dict[str, Any], pattern: str, flag: str) -> dict[str, Any]:
    found = {path: facts for path, facts in paths.items() if re.search(pattern, path)}
    if not found:
        raise UserError(
            f"{flag}={pattern} matches no parameter; paths look like {next(iter(paths))}, and with "
            "--model.scan_layers one path stands for all layers"
        )
    return found


def _nested(
    kernels: dict[str, ParameterFacts], make: Callable[[str, ParameterFacts], dict[str, Any]]
) -> Tree:
    """Returns make(path, facts) for each kernel, nested by the parts of its path."""
    tree: Tree = {}
    for path, facts in kernels.items():
        node = tree
        for part in path.split("/"):
            node = node.setdefault(part, {})
        node |= make(path, facts)
    return tree
