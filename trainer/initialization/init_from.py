"""Starts a run from existing parameters: `--init_from`.

    --init_from=MODEL_DIR       one of our runs: its newest checkpoint; or MODEL_DIR/checkpoint_N
    --init_from=DIR             a run of T5X or of Mesh TensorFlow, likewise
    --init_from=hf:DIR          a model of Hugging Face transformers

Names and shapes are checked against the model before any array is created. Each process then reads
only the parts of arrays that its devices hold.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tasks import annexes
from tasks.terminal.command_line import UserError, nearest
from trainer.checkpoints import layout
from trainer.checkpoints.layout import Parts
from trainer.checkpoints.stored import NO_STEP, Checkpoint, load
from trainer.checkpoints.tensors import Tensor, held
from trainer.config import Config, from_transformers, stored_model
from trainer.config.stored import refuse_average
from trainer.data.run import Run
from trainer.engine.program import Program
from trainer.engine.step import TrainState
from trainer.engine.trainable import tuning_of
from trainer.huggingface import configs
from trainer.initialization import vocabularies
from trainer.model.config import ModelConfig
from trainer.model.paths import named, path_name
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params, parameter_facts

# Leaves of an optimizer's state that count updates.
_COUNT = re.compile(r"(.*/)?count")
# Far above any sound element of parameters or moments, far below one with a flipped exponent.
_LARGEST = 1e30
_NONE_STORED = "none is stored"
_EMBEDDING = "token_embedder/embedding"


@dataclass(frozen=True)
class StartingPoint:
    """Parameters and optimizer state to start from: checked, but not read yet.

    `path` is their source, for messages. Leaves that `optimizer_state` lacks start as a new run's;
    `reset` is the reason if moments are not loaded. `other_fields`, such as "emb_dim 512", are
    settings of the source that change the function here. `rows` says how rows of its vocabulary
    became rows of this run's, if they did.
    """

    path: str
    step: int
    parameters: dict[str, Tensor]
    optimizer_state: dict[str, Tensor]
    reset: str | None
    vocabulary_checked: bool
    other_fields: list[str]
    rows: str = ""

    def describe(self) -> str:
        """Returns a description of the run's starting point and optimizer state."""
        state = f"a new optimizer state ({self.reset})" if self.reset else "the optimizer state"
        text = f"starts from {self.path}, after step {self.step}, with {state}"
        if self.other_fields:
            text += (
                f"; it was trained with {', '.join(self.other_fields)}: with this run's settings "
                "its parameters compute something else"
            )
        if self.rows:
            text += f"; vocabulary: {self.rows}"
        elif not self.vocabulary_checked:
            text += (
                "; the checkpoint does not record its vocabulary: make sure it is this run's"
                f"{annexes.advice('other_vocabulary')}"
            )
        return text

    def state(self, program: Program) -> TrainState:
        """Reads the arrays onto the program's devices."""
        params = placed(self.parameters, program.abstract_model())
        state = program.state_of(params, self.step)
        return replace(state, opt_state=placed(self.optimizer_state, state.opt_state))


def start(run: Run) -> StartingPoint:
    """Opens `config.init_from` and checks it against the run's model and vocabulary."""
    config = run.config
    flag = f"--init_from={config.init_from}"
    found, checkpoint = _open(config)
    if checkpoint and checkpoint.run and config.init_from_state:
        refuse_average(checkpoint.run.get("config", {}), checkpoint.path)
    found, checkpoint, is_known, words = _of_own_vocabulary(run, checkpoint, found)
    if checkpoint is None and not words:
        _check_special_ids(run)
    scanned = checkpoint is not None and any(map(layout.is_stacked, checkpoint.parameters))
    found = fitted(flag, found, config.model, run.data.vocab_size, scanned)

    step = checkpoint.step if checkpoint and config.init_from_state else 0
    if step == NO_STEP:
        raise UserError(
            f"{flag} does not say how many updates were made (state/step is missing or negative): "
            "start at step 0, with a new optimizer state, using --init_from_state=false"
        )
    if step >= config.train_steps:
        raise UserError(
            f"{flag} has already made {step} steps, which count towards "
            f"--train_steps={config.train_steps}: raise it, or start at step 0 with "
            "--init_from_state=false"
        )
    parameters = layout.stack(found) if config.model.scan_layers else found
    kept, reset = optimizer_state(config, checkpoint, found)
    return StartingPoint(
        path=checkpoint.path if checkpoint else str(config.init_from),
        step=step,
        parameters={name: parts["value"] for name, parts in parameters.items()},
        optimizer_state=kept,
        reset=reset,
        vocabulary_checked=is_known,
        other_fields=_other_fields(checkpoint, config.model),
        rows=words,
    )


def _of_own_vocabulary(
    run: Run, checkpoint: Checkpoint | None, found: dict[str, Parts]
) -> vocabularies.Fitted:
    """Returns what was found, with rows for the run's vocabulary if an annex makes them."""
    tables = [parts["value"] for name, parts in found.items() if name.endswith(_EMBEDDING)]
    rows = {table.shape[:1] for table in tables}
    if len(rows) != 1 or rows == {()}:
        return vocabularies.Fitted(found, checkpoint, True)  # reported with the names and shapes
    for other in annexes.every(vocabularies.SLOT):
        return other.renewed(run, checkpoint, found, *rows.pop())
    return vocabularies.same(run, checkpoint, found)


def _other_fields(checkpoint: Checkpoint | None, model: ModelConfig) -> list[str]:
    if checkpoint is None or checkpoint.run is None:
        return []
    stored = checkpoint.run["config"]["model"]
    trained = stored_model(stored, checkpoint.path)
    same = configs.same_model(trained, replace(model, vocab_size=trained.vocab_size))
    start = [] if trained.start_id == model.start_id else [f"start_id {trained.start_id}"]
    return start + ([] if same else configs.different_fields(model, trained))


def _check_special_ids(run: Run) -> None:
    """Raises a UserError if the special ids of a transformers folder are not the run's."""
    from trainer import huggingface
    from trainer.huggingface import special_ids

    folder = str(run.config.init_from).removeprefix(from_transformers.PREFIX)
    model, eos = huggingface.model_config(folder), run.converter.special.eos
    if model.has_decoder:
        ids, where = huggingface.special_ids_of(folder), f"--init_from={run.config.init_from}"
        special_ids.check_eos(ids, where, model.vocab_size, eos, "the run's vocabulary")


def fitted(
    flag: str, found: dict[str, Parts], model: ModelConfig, ids: int, scanned: bool
) -> dict[str, Parts]:
    """Returns parameters under the model's names, after checking all names and shapes.

    `flag` is their source, for messages; `found` has unstacked layers; `ids` is the vocabulary
    size; `scanned` is True if the checkpoint stacks layers, which changes names in messages. Raises
    a UserError that names a parameter that does not fit.
    """
    spec = model_spec(replace(model, scan_layers=False))
    expected = {path: facts.shape for path, facts in parameter_facts(spec).items()}
    if not layout.have_positions_per_layer(expected):
        found = layout.with_shared_positions(flag, found)
    elif not layout.have_positions_per_layer(found):
        raise UserError(
            f"{flag} has no table of relative positions per layer: leave out "
            f"--model.position={model.position}"
        )
    _check_names(flag, found, expected, scanned)
    _check_shapes(flag, found, expected, ids)
    return found


def _open(config: Config) -> tuple[dict[str, Parts], Checkpoint | None]:
    """Returns the unscanned parameters by name, and their checkpoint (None for Hugging Face)."""
    path = str(config.init_from)
    if not path.startswith(from_transformers.PREFIX):
        checkpoint = load(path)
        return layout.read_parts(checkpoint), checkpoint
    # Imported here because it needs packages that the trainer does not otherwise need.
    from trainer import huggingface

    folder = path.removeprefix(from_transformers.PREFIX)
    # The number of rows is compared later: another vocabulary's rows are mapped to this run's.
    theirs = huggingface.model_config(folder)
    if adapters := config.entries("folder_parameters"):
        leaves = adapters[0](config, folder, theirs)
    else:
        tree = huggingface.load(folder, replace(config.model, vocab_size=theirs.vocab_size))
        leaves = named(tree)
    return {path: {"value": held(leaf)} for path, leaf in leaves.items()}, None


def _check_names(
    flag: str, found: dict[str, Parts], expected: dict[str, Any], scanned: bool
) -> None:
    """Rejects missing and unexpected parameters; messages use a scanned checkpoint's own names."""

    def shown(names: Iterable[str]) -> list[str]:
        stack = (lambda name: re.sub(r"(\w+)/layers_\d+/", r"\1/\1/", name)) if scanned else str
        return list(dict.fromkeys(map(stack, names)))

    missing = shown(name for name in expected if name not in found)
    extra = shown(name for name in found if name not in expected)
    for verb, names, others, model in (
        ("lacks", missing, extra, "has"),
        ("has", extra, expected, "does not have"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"{flag} {verb} {names[0]}{nearest(names[0], others)}{more}, which the model "
                f"{model}: choose the preset it was trained with"
            )


def _check_shapes(
    flag: str, found: dict[str, Parts], expected: dict[str, tuple[int, ...]], ids: int
) -> None:
    # Embeddings first: a wrong number of rows is the most common mistake, and the easiest to fix.
    embeddings = [name for name in expected if name.endswith(_EMBEDDING)]
    for name in dict.fromkeys([*embeddings, *expected]):
        shape = expected[name]
        value = found[name]["value"]
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise UserError(f"{flag}: {name} has dtype {value.dtype}, expected floating point")
        if value.shape == shape:
            continue
        if name in embeddings and value.shape[1:] == shape[1:]:
            rows = value.shape[0]
            advice = f"set --model.vocab_size={rows}: rows above the {ids} ids are padding"
            if rows < ids:
                advice = f"it was trained with a different vocabulary: this run's has {ids} ids"
            raise UserError(f"{flag}: {name} has {rows} rows, the model has {shape[0]}; {advice}")
        raise UserError(
            f"{flag}: {name} has shape {value.shape}, but {shape} in the model: choose the "
            "preset it was trained with, or set its --model fields"
        )


def optimizer_state(
    config: Config, checkpoint: Checkpoint | None, found: dict[str, Parts]
) -> tuple[dict[str, Tensor], str | None]:
    """Returns the optimizer state's leaves by name, and the reason if moments start at 0."""
    abstract = _abstract_state(config)
    shapes = {name: leaf.shape for name, leaf in named(abstract).items()}
    counts = [name for name in shapes if _COUNT.fullmatch(name)]
    if not checkpoint or not config.init_from_state:
        step, leaves = 0, None
        reason: str | None = "--init_from_state=false" if checkpoint else _NONE_STORED
    else:
        step = checkpoint.step
        theirs = _comparable(checkpoint.state)
        stored = {theirs[name]: tensor for name, tensor in checkpoint.state.items()}
        own = {name: other for name, other in _comparable(shapes).items() if other}
        if {name: tensor.shape for name, tensor in stored.items() if name} == {
            own[name]: shapes[name] for name in own
        }:
            return {name: stored[other] for name, other in own.items()}, None
        leaves, reason = _adafactor_leaves(config, found)
    moments = {name: name.partition("/")[2] for name in shapes.keys() - {*counts}}
    if leaves is not None and {other: shapes[name] for name, other in moments.items()} == {
        name: tensor.shape for name, tensor in leaves.items()
    }:
        places = {name: leaves[other] for name, other in moments.items()}
        return places | dict.fromkeys(counts, held(np.int32(step))), None
    of_schedules = _schedule_counts(abstract)
    # Schedules continue at `step`; Adafactor's decay restarts, at `step_offset`.
    offset = config.optimizer.value("step_offset") or 0
    values = {name: step if name in of_schedules else offset for name in counts}
    return {name: held(np.int32(value)) for name, value in values.items()}, reason


def _comparable(names: Iterable[str]) -> dict[str, str]:
    """Returns the name of each leaf without `--plateau.metric`; "" for the scale of the rate.

    A new run has evaluated nothing, so its rates start undiminished whatever its source's were.
    Its first part, the place in a chain, is counted without places that have no arrays: clipping
    has one.
    """
    names = list(names)
    places = sorted({int(name.split("/")[0]) for name in names if re.match(r"\d+/", name)})
    ranks = {str(place): str(rank) for rank, place in enumerate(places)}

    def comparable(name: str) -> str:
        first, slash, rest = name.partition("/")
        return f"{ranks.get(first, first)}{slash}{rest.removeprefix('inner/')}"

    return {name: "" if name.endswith("/rate_scale") else comparable(name) for name in names}


def _adafactor_leaves(
    config: Config, found: dict[str, Parts]
) -> tuple[dict[str, Tensor] | None, str | None]:
    """Returns the checkpoint's Adafactor moments by leaf, or None and why they are unusable."""
    if all(set(parts) == {"value"} for parts in found.values()):
        return None, _NONE_STORED
    if config.optimizer.name != "adafactor":
        return None, f"the stored one is Adafactor's, but --optimizer.name={config.optimizer.name}"
    momentum = bool(config.optimizer.value("beta1"))
    least = config.optimizer.value("min_dim_size_to_factor")
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


def _abstract_state(config: Config) -> Any:
    spec = model_spec(config.model)
    tuning = tuning_of(config, spec)
    optimizer = tuning.optimizer()

    def init(key: jax.Array) -> Any:
        return optimizer.init(tuning.begun(init_params(spec, key), config.seed))

    return jax.eval_shape(init, jax.random.key(0))


def _schedule_counts(state: Any) -> set[str]:
    """Returns the counts that learning rate schedules read: the only fields of their states."""

    def is_schedule(node: Any) -> bool:
        return getattr(node, "_fields", None) == ("count",)

    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_schedule)
    return {f"{path_name(path)}/count" for path, node in nodes if is_schedule(node)}


def sound(name: str, value: np.ndarray, flag: str = "--init_from") -> np.ndarray:
    """Returns `value`; raises a UserError if it has NaN, infinite or absurd elements."""
    if not np.issubdtype(value.dtype, np.floating) or not value.size:
        return value
    largest = float(np.max(np.abs(value)))
    if not largest <= _LARGEST:
        what = f"an element of {largest:.1e}" if math.isfinite(largest) else "NaN or infinity"
        raise UserError(
            f"{flag}: {name} holds {what}: the checkpoint is damaged, or its run had failed; "
            "choose another one"
        )
    return value


def placed(tensors: dict[str, Tensor], tree: Any) -> Any:
    """Returns `tree` with the leaves in `tensors` read, in the tree's dtypes and shardings."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [path_name(path) for path, _ in leaves]

    def read(name: str, like: Any) -> jax.Array:
        tensor = tensors[name]
        return jax.make_array_from_callback(
            like.shape,
            like.sharding,
            lambda index: sound(name, np.asarray(tensor.read(index or ()), like.dtype)),
        )

    # Sorted so that all layers of a stacked array are read in turn, while its chunks are cached.
    read_leaves = {
        name: read(name, leaf) if name in tensors else leaf
        for name, (_, leaf) in sorted(
            zip(names, leaves, strict=True), key=lambda entry: re.sub(r"layers_\d+", "", entry[0])
        )
    }
    return jax.tree.unflatten(structure, [read_leaves[name] for name in names])
