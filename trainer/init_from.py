"""The beginning of a run from parameters that there are: `--init_from`.

    --init_from=MODEL_DIR       one of ours: its newest checkpoint; or MODEL_DIR/checkpoint_N
    --init_from=DIR             one of T5X, likewise
    --init_from=hf:DIR          a model of Hugging Face transformers

Names and shapes are held against the model before an array is made; then each process reads of each
array what its devices hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tasks.terminal.command_line import UserError, nearest
from trainer.config import Config
from trainer.engine.program import Program
from trainer.engine.step import TrainState
from trainer.model.paths import named, path_name
from trainer.model.spec import model_spec
from trainer.model.transformer import decayed, init_params, logical_axes, parameter_facts
from trainer.optim.optimizer import make_optimizer
from trainer.setup import Run, vocabulary_sha256
from trainer.t5x import layout
from trainer.t5x.layout import Parts
from trainer.t5x.read import Checkpoint, load
from trainer.t5x.tensors import Tensor, held

HUGGING_FACE = "hf:"
# Leaves of an optimizer's state that count updates.
_COUNT = re.compile(r"(.*/)?count")


@dataclass(frozen=True)
class Start:
    """What a run begins with: checked, nothing of it read.

    `step` updates were made before. `state` has leaves of the optimizer's state by name; one that
    it lacks begins at 0. `afresh` says why moments do, None if they come along.
    """

    path: str
    step: int
    parameters: dict[str, Tensor]
    state: dict[str, Tensor]
    afresh: str | None
    same_vocabulary: bool

    def describe(self) -> str:
        """Where the run begins and with what of an optimizer's state."""
        state = "with the optimizer state"
        if self.afresh:
            state = f"with an optimizer state begun afresh ({self.afresh})"
        vocabulary = ""
        if not self.same_vocabulary:
            vocabulary = "; it does not say of what vocabulary it is: that has to be this one"
        return f"starts from {self.path}, after step {self.step}, {state}{vocabulary}"

    def train_state(self, program: Program) -> TrainState:
        """Reads the arrays, each to where the program wants it."""
        params = _placed(self.parameters, program.abstract_state().params)
        state = program.state_of(params, self.step)
        return replace(state, opt_state=_placed(self.state, state.opt_state))


def start(run: Run) -> Start:
    """Opens `config.init_from` and holds it against the run's model and vocabulary.

    Raises:
      UserError: it cannot be read, or is another model's; names the tensor or what differs.
    """
    config = run.config
    flag = f"--init_from={config.init_from}"
    found, checkpoint = _open(config)
    if checkpoint and checkpoint.run:
        stored = checkpoint.run.get("vocabulary_sha256")
        if stored and stored != (vocabulary_sha256(run.data) or stored):
            raise UserError(f"{flag}: it was trained with another vocabulary than this run's")
    spec = model_spec(replace(config.model, scan_layers=False))
    expected = {path: facts.shape for path, facts in parameter_facts(spec).items()}
    scanned = checkpoint is not None and any(map(layout.is_stacked, checkpoint.parameters))
    _check_names(flag, found, expected, scanned)
    _check_shapes(flag, found, expected, run.data.vocab_size)

    step = checkpoint.step if checkpoint and config.init_from_state else 0
    if step >= config.train_steps:
        raise UserError(
            f"{flag} has made {step} steps and --train_steps={config.train_steps} counts them: set "
            "it higher, or begin at step 0 with --init_from_state=false"
        )
    parameters = layout.stack(found) if config.model.scan_layers else found
    state, afresh = _state(config, checkpoint, found)
    return Start(
        path=checkpoint.path if checkpoint else str(config.init_from),
        step=step,
        parameters={name: parts["value"] for name, parts in parameters.items()},
        state=state,
        afresh=afresh,
        same_vocabulary=bool(checkpoint and checkpoint.run),
    )


def _open(config: Config) -> tuple[dict[str, Parts], Checkpoint | None]:
    path = str(config.init_from)
    if not path.startswith(HUGGING_FACE):
        checkpoint = load(path)
        return layout.read_parts(checkpoint), checkpoint
    # It needs what the trainer otherwise does without.
    from trainer import huggingface

    tree = huggingface.load(path.removeprefix(HUGGING_FACE), config.model)
    return {path: {"value": held(leaf)} for path, leaf in named(tree).items()}, None


def _check_names(
    flag: str, found: dict[str, Parts], expected: dict[str, Any], scanned: bool
) -> None:
    def shown(names: Iterable[str]) -> list[str]:
        stack = (lambda name: re.sub(r"(\w+)/layers_\d+/", r"\1/\1/", name)) if scanned else str
        return list(dict.fromkeys(map(stack, names)))

    missing = shown(name for name in expected if name not in found)
    extra = shown(name for name in found if name not in expected)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{flag} lacks {missing[0]}{nearest(missing[0], extra)}{more}, which the model has: "
            "choose the preset that it was made with"
        )
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{flag} has {extra[0]}{nearest(extra[0], expected)}{more}, which the model has not: "
            "choose the preset that it was made with"
        )


def _check_shapes(
    flag: str, found: dict[str, Parts], expected: dict[str, tuple[int, ...]], ids: int
) -> None:
    embeddings = [name for name in expected if name.endswith("token_embedder/embedding")]
    for name in dict.fromkeys([*embeddings, *expected]):
        shape = expected[name]
        value = found[name]["value"]
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise UserError(f"{flag}: {name} is of {value.dtype}, and no floating-point numbers")
        if value.shape == shape:
            continue
        if name in embeddings and value.shape[1:] == shape[1:]:
            rows = value.shape[0]
            what = f"set --model.vocab_size={rows}: rows above the {ids} ids are padding"
            if rows < ids:
                what = f"the vocabulary has {ids} ids, so it is not the one that it was made with"
            raise UserError(f"{flag}: {name} has {rows} rows and the model {shape[0]}; {what}")
        raise UserError(
            f"{flag}: {name} has the shape {value.shape} and in the model {shape}: choose the "
            "preset that it was made with, or set its --model fields"
        )


def _state(
    config: Config, checkpoint: Checkpoint | None, found: dict[str, Parts]
) -> tuple[dict[str, Tensor], str | None]:
    """Leaves of the optimizer's state, and why moments begin afresh if they do."""
    abstract = _abstract_state(config)
    shapes = {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    }
    counts = [name for name in shapes if _COUNT.fullmatch(name)]
    if not checkpoint or not config.init_from_state:
        step, leaves = 0, None
        reason: str | None = "--init_from_state=false" if checkpoint else "it has none"
    else:
        step, stored = checkpoint.step, checkpoint.state
        if {name: tensor.shape for name, tensor in stored.items()} == shapes:
            return stored, None
        leaves, reason = _adafactor_leaves(config, found)
    if leaves is not None and {
        name.partition("/")[2]: shape for name, shape in shapes.items() if name not in counts
    } == {name: tensor.shape for name, tensor in leaves.items()}:
        places = {name: leaves[name.partition("/")[2]] for name in shapes if name not in counts}
        return places | dict.fromkeys(counts, held(np.int32(step))), None
    of_schedules = _schedule_counts(abstract)
    # As `step_offset` means it: Adafactor's decay begins with the run.
    begun = config.optimizer.value("step_offset") or 0
    values = {name: step if name in of_schedules else begun for name in counts}
    return {name: held(np.int32(value)) for name, value in values.items()}, reason


def _adafactor_leaves(
    config: Config, found: dict[str, Parts]
) -> tuple[dict[str, Tensor] | None, str | None]:
    """Moments under the names of the leaves of our Adafactor, without the place in its chain."""
    if all(set(parts) == {"value"} for parts in found.values()):
        return None, "it has none"
    if config.optimizer.name != "adafactor":
        return None, f"it is Adafactor's, and --optimizer.name={config.optimizer.name}"
    momentum, least = bool(config.optimizer.value("beta1")), _least(config)
    kept: dict[str, Parts] = {}
    for name, parts in found.items():
        factors = layout.by_size(parts["value"].shape, least)
        kept[name], problem = layout.adafactor_parts(name, parts, factors, momentum)
        if problem:
            return None, problem
    leaves = {}
    for name, parts in (layout.stack(kept) if config.model.scan_layers else kept).items():
        shape = layout.own_shape(name, parts["value"].shape)
        for kind, tensor in layout.moments(parts, layout.by_size(shape, least)).items():
            if kind != "m":
                leaves[f"{kind}/{name}"] = tensor
            elif momentum:
                leaves[f"ema/{name}"] = tensor
    return leaves, None


def _least(config: Config) -> int:
    return config.optimizer.value("min_dim_size_to_factor")


def _abstract_state(config: Config) -> Any:
    spec = model_spec(config.model)
    optimizer = make_optimizer(config.optimizer, logical_axes(spec), decayed(spec))
    return jax.eval_shape(lambda key: optimizer.init(init_params(spec, key)), jax.random.key(0))


def _schedule_counts(state: Any) -> set[str]:
    """Names of counts beside which nothing is kept: what a schedule reads."""

    def alone(node: Any) -> bool:
        return getattr(node, "_fields", None) == ("count",)

    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=alone)
    return {f"{path_name(path)}/count" for path, node in nodes if alone(node)}


def _placed(tensors: dict[str, Tensor], tree: Any) -> Any:
    """`tree` with the leaves that `tensors` has read, in their dtypes and shardings."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [path_name(path) for path, _ in leaves]

    def read(name: str, like: Any) -> jax.Array:
        tensor = tensors[name]
        return jax.make_array_from_callback(
            like.shape,
            like.sharding,
            lambda index: np.asarray(tensor.read(index or ()), like.dtype),
        )

    # All layers of one stacked array one after the other, while its chunks are remembered.
    placed = {
        name: read(name, leaf) if name in tensors else leaf
        for name, (_, leaf) in sorted(
            zip(names, leaves, strict=True), key=lambda entry: re.sub(r"layers_\d+", "", entry[0])
        )
    }
    return jax.tree.unflatten(structure, [placed[name] for name in names])
