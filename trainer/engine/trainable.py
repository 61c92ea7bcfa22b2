"""The trainable parameters of a run: all, some selected by name, or an annex's besides fixed ones.

In trees of trainable parameters, optax's `MaskedNode`, which has no leaves, replaces fixed
parameters: these get neither gradients nor optimizer state.
"""

import math
import re
from typing import Any

import jax
import optax

from tasks.terminal.command_line import UserError
from trainer.config import Config
from trainer.model.paths import named, path_name
from trainer.model.spec import EncoderSpec, ModelSpec
from trainer.model.transformer import parameter_tree
from trainer.optim.optimizer import make_optimizer

Tree = Any


def tuning_of(config: Config, spec: ModelSpec | EncoderSpec) -> "Tuning":
    """Returns what learns in a run: an annex's choice if its settings are on."""
    kinds = config.entries("tunings")
    found: Tuning = (kinds[0] if kinds else Tuning)(config, spec)
    return found


class Tuning:
    """The trainable parameters of a run, and their optimizer; `axes` include added ones.

    An annex of the slot `tunings` extends it: its parameters are below `added` in a run's tree.
    """

    added = ""

    def __init__(self, config: Config, spec: ModelSpec | EncoderSpec):
        self._config = config
        facts = self._with_added(parameter_tree(spec))
        self._facts = facts
        self.axes = jax.tree.map(lambda each: each.axes, facts)
        paths = named(facts).keys()
        own = [path for path in paths if not self.added or not path.startswith(f"{self.added}/")]
        chosen = {*paths}
        if config.trainable is not None or self.added:
            chosen -= {*own}
            if config.trainable is not None:
                chosen |= matching(dict.fromkeys(own), config.trainable, "--trainable").keys()
        self._learns = {path: path in chosen for path in paths}
        self._own = own
        self.all_learn = all(self._learns.values())

    def _with_added(self, facts: Tree) -> Tree:
        """Returns facts of all parameters, `facts` and those below `added`."""
        return facts

    @property
    def adds(self) -> bool:
        """True if the run adds parameters to the model's own."""
        return bool(self.added)

    def own(self, params: Tree) -> Tree:
        """Returns the model's own parameters, without what is added."""
        return {name: tree for name, tree in params.items() if name != self.added}

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
        """Returns the model's own parameters with the initial ones of what is added."""
        return params

    def merged(self, params: Tree) -> Tree:
        """Returns the model's own parameters, with what was added merged into them."""
        return params

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
        total = sum(sizes[path] for path in self._own)
        what = self._words(f"{sum(self._learns.values())} arrays selected by --trainable")
        return [("learning", f"{what}: {learning:,} parameters beside {total:,} of the model")]

    def _words(self, selected: str) -> str:
        """Says what learns; `selected` says what --trainable selects."""
        return selected

    def _masked(self, tree: Tree, kept: bool) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                leaf if self._learns[path_name(path)] == kept else optax.MaskedNode()
            ),
            tree,
            # Other nodes, such as PartitionSpecs, are trees themselves.
            is_leaf=lambda node: not isinstance(node, dict),
        )


def matching(paths: dict[str, Any], pattern: str, flag: str) -> dict[str, Any]:
    found = {path: facts for path, facts in paths.items() if re.search(pattern, path)}
    if not found:
        raise UserError(
            f"{flag}={pattern} matches no parameter; paths look like {next(iter(paths))}, and with "
            "--model.scan_layers one path stands for all layers"
        )
    return found
