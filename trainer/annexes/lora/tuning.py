"""LoRA's parameters: how they begin, what they add, and how a checkpoint's are merged.

Dimensions: D inputs of a kernel, F its outputs, R rank.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tasks.terminal.command_line import UserError
from trainer.annexes.lora.options import LORA, LoraConfig
from trainer.checkpoints.tensors import Index, Tensor
from trainer.config import Config
from trainer.engine.trainable import Tuning, matching
from trainer.model.parameters import KERNEL, ParameterFacts
from trainer.model.paths import named, path_name
from trainer.model.spec import EncoderSpec, ModelSpec
from trainer.optim.stacked import STACK_AXES

Tree = Any


class LoraTuning(Tuning):
    """LoRA's parameters, and those that --trainable selects."""

    added = LORA

    def __init__(self, config: Config, spec: ModelSpec | EncoderSpec):
        self._lora: LoraConfig = config.lora  # type: ignore[attr-defined]
        super().__init__(config, spec)

    def _with_added(self, facts: Tree) -> Tree:
        self._kernels = matching(named(facts), self._lora.pattern, "--lora.kernels")
        return {**facts, LORA: _nested(self._kernels, self._added)}

    def begun(self, params: Tree, seed: int) -> Tree:
        """Returns the model's own parameters with initial additions: A is drawn, B is 0."""

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
        """Returns the model's own parameters, with the products added to their kernels."""
        added = named(params[LORA])

        def summed(path: tuple, param: jax.Array) -> jax.Array:
            name = path_name(path)
            if name not in self._kernels:
                return param
            # Any axes between the first and the last index the layers.
            product = jnp.einsum("d...r,r...f->d...f", added[f"{name}/a"], added[f"{name}/b"])
            return param + self._lora.scale * product

        return jax.tree_util.tree_map_with_path(summed, self.own(params))

    def _words(self, selected: str) -> str:
        what = f"LoRA of rank {self._lora.rank} on {len(self._kernels)} kernels"
        return what + (" and arrays of --trainable" if self._config.trainable is not None else "")

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


def merged(parameters: dict[str, Tensor], run: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a checkpoint's kernels plus LoRA's products, read lazily.

    `run` is the stored configuration. Middle axes index layers.
    """
    config = LoraConfig(**run[LORA])

    def summed(kernel: Tensor, a: Tensor, b: Tensor) -> Tensor:
        def read(index: Index) -> np.ndarray:
            first, *between, last = index
            everything = slice(None)
            factors = a.read((first, *between, everything)), b.read((everything, *between, last))
            product = np.einsum("d...r,r...f->d...f", *factors)
            return kernel.read(index) + np.float32(config.scale) * product

        return Tensor(kernel.shape, kernel.dtype, read)

    found = {}
    for name, tensor in parameters.items():
        if not name.startswith(f"{LORA}/"):
            a, b = (parameters.get(f"{LORA}/{name}/{side}") for side in "ab")
            found[name] = summed(tensor, a, b) if a and b else tensor
    return found
