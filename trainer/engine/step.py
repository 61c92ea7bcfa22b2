"""Training and evaluation steps: pure functions, jitted over a device mesh."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tasks.terminal.command_line import UserError
from trainer.config import Config
from trainer.data.features import FILLING, token_places
from trainer.engine.compiled_programs import options
from trainer.engine.guard import Guard, checked, new_guard
from trainer.engine.loss import ModelLoss, Scale, model_loss, sequence_accuracy
from trainer.engine.metrics import Metrics
from trainer.engine.sharding import replicated, rows, tracing_on
from trainer.engine.trainable import Tuning
from trainer.model.transformer import Encoder, Transformer, rounded_kernels, run_model

Batch = dict[str, Any]


@flax.struct.dataclass
class TrainState:
    """The training state, as stored in checkpoints.

    `step`, an int32 scalar, counts updates. `metrics` are (sum, weight) float32 scalars, summed
    since they were last written; they are stored so that a resumed run writes the same numbers.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    metrics: Metrics
    guard: Guard = flax.struct.field(default_factory=new_guard)


def zero_metrics(model: Transformer | Encoder, config: Config) -> Metrics:
    """Returns a training step's metrics, all zero.

    They are the loss's metrics, `gradient_norm`, and `inputs_full` and `targets_full`, the
    fractions of positions that are not padding.
    """
    has_encoder = isinstance(model, Encoder) or model.spec.encoder is not None
    names = [*training_loss(model, config).metrics, "gradient_norm"]
    names += ["inputs_full"] * has_encoder + ["targets_full"] * isinstance(model, Transformer)
    return {name: (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)) for name in names}


def training_loss(model: Transformer | Encoder, config: Config) -> ModelLoss:
    """Returns the loss that a run trains with: the model's own, or what annexes make of it."""
    loss = model_loss(model)
    for wrapped in config.entries("losses"):
        loss = wrapped(loss, config)
    return loss


class Shares(NamedTuple):
    """Shardings of an update in which each part of "data" updates its own share of a parameter.

    Gradients are summed into shares, and new kernels are gathered once a step. Source: Xu et al.
    2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
    arXiv:2004.13336; the first stage of ZeRO, arXiv:1910.02054.

    Attributes:
      own: the sharding of each parameter, its gradient and its moments.
      used: the sharding of each parameter in the model's passes.
    """

    own: Any
    used: Any


@dataclasses.dataclass(frozen=True)
class Parts:
    """The components of a run's steps; `shardings` apply to the state's arrays.

    `shares` is None if every part of "data" updates all parameters.
    """

    model: Transformer | Encoder
    optimizer: optax.GradientTransformation
    config: Config
    mesh: Mesh
    shardings: TrainState
    tuning: Tuning
    shares: Shares | None = None


def make_update(parts: Parts) -> Callable[[TrainState, Batch], tuple[TrainState, Any, Any]]:
    """Returns (state, batch) -> (state, gradients, parameter changes), to be jitted.

    Gradients and changes are trees of `tuning.learned`. If the update is rejected, the state is
    the one `checked` keeps; gradients and changes are the rejected ones.
    """
    optimizer, config, tuning = parts.optimizer, parts.config, parts.tuning
    gradients_of = make_gradients(parts.model, config, tuning, parts.shares)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Any, Any]:
        # The key is derived from the step, so that a resumed run drops the same units.
        dropout_key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        with tracing_on(parts.mesh, config.mesh.rules):
            gradients, metrics = gradients_of(state.params, batch, dropout_key)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        largest = max(batch[feature].size for _, feature in FILLING.values() if feature in batch)
        if largest >= 2**31:
            raise UserError(f"a batch has {largest:,} tokens; a step counts up to {2**31:,}")
        metrics = {
            **metrics,
            "gradient_norm": (optax.tree.norm(gradients), jnp.ones((), jnp.float32)),
            **{
                name: (jnp.count_nonzero(token_places(batch, side)), batch[feature].size)
                for name, (side, feature) in FILLING.items()
                if feature in batch
            },
        }
        after = TrainState(
            step=state.step + 1,
            params=tuning.updated(state.params, updates),
            opt_state=opt_state,
            metrics={
                name: (state.metrics[name][0] + total, state.metrics[name][1] + weight)
                for name, (total, weight) in metrics.items()
            },
        )
        return checked(state, after, gradients, metrics["loss"], config), gradients, updates

    return update


def make_train_step(parts: Parts) -> Callable[[TrainState, Batch], TrainState]:
    """Returns the jitted update (state, batch) -> state; it donates the state."""
    update = make_update(parts)

    @partial(
        jax.jit,
        donate_argnums=0,
        in_shardings=(parts.shardings, rows(parts.mesh)),
        out_shardings=parts.shardings,
        compiler_options=options(parts.mesh, parts.config.compiler_options),
    )
    def train_step(state: TrainState, batch: Batch) -> TrainState:
        return update(state, batch)[0]

    return train_step


def used_parameters(model: Transformer | Encoder, params: Any, shares: Shares | None = None) -> Any:
    """Returns the model's own parameters as its passes use them: rounded, and not in shares."""
    params = rounded_kernels(model.spec, params)
    return params if shares is None else jax.lax.with_sharding_constraint(params, shares.used)


def make_gradients(
    model: Transformer | Encoder,
    config: Config,
    tuning: Tuning | None = None,
    shares: Shares | None = None,
) -> Callable[[Any, Batch, jax.Array], tuple[Any, Metrics]]:
    """Returns (params, batch, dropout key) -> (gradients of the batch's loss, metrics).

    Gradients cover the parameters that `tuning` trains, or all parameters. `config.microbatches`
    above 1 splits the batch into that many parts, processed in turn; part i has the dropout key
    `fold_in(key, i)`. Gradients and metrics are float32 sums over the parts. The loss's divisor
    comes from the whole batch, so that the parts' losses add up to the batch's loss whatever the
    distribution of tokens; with `loss.normalize_over` "microbatch", from each part.

    Source: google-research/t5x, `trainer.accumulate_grads_microbatched`, for separately normalized
    parts.
    """
    loss, count = training_loss(model, config), config.microbatches
    apart = config.loss.normalize_over == "microbatch"
    partial_of = None if tuning is None or tuning.all_learn else tuning

    def loss_of(params: Any, batch: Batch, scale: Scale, dropout_key: jax.Array) -> Any:
        output = run_model(model, params, batch, dropout_key)
        return loss.of_batch(output, batch, config.loss, scale)

    def loss_of_learned(learned: Any, fixed: Any, *others: Any) -> Any:
        assert tuning
        params = tuning.merged(tuning.joined(learned, fixed))
        return loss_of(rounded_kernels(model.spec, params), *others)

    def gradient(params: Any, *others: Any) -> tuple[Any, Metrics]:
        if partial_of is None:
            gradients, metrics = jax.grad(loss_of, has_aux=True)(params, *others)
            if shares is not None:
                gradients = jax.lax.with_sharding_constraint(gradients, shares.own)
                # Otherwise a consumer may slice the whole sum: an all-reduce, not a reduce-scatter.
                gradients = jax.tree.map(jax.lax.optimization_barrier, gradients)
        else:
            trees = partial_of.learned(params), partial_of.fixed(params)
            gradients, metrics = jax.grad(loss_of_learned, has_aux=True)(*trees, *others)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients), metrics

    def gradients_of(params: Any, batch: Batch, dropout_key: jax.Array) -> tuple[Any, Metrics]:
        if partial_of is None:
            params = used_parameters(model, params, shares)
        scale = loss.scale(batch, config.loss)
        if count == 1:
            return gradient(params, batch, scale, dropout_key)

        def add(sums: tuple[Any, Metrics], part: tuple[jax.Array, Batch]) -> Any:
            number, rows_of_part = part
            key = jax.random.fold_in(dropout_key, number)
            of_part = loss.scale(rows_of_part, config.loss) if apart else scale
            return jax.tree.map(jnp.add, sums, gradient(params, rows_of_part, of_part, key)), None

        parts = jax.tree.map(adjacent if apart else interleaved, batch)
        zeros = {name: (jnp.zeros(()), jnp.zeros(())) for name in loss.metrics}
        like = params if partial_of is None else partial_of.learned(params)
        start = (jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like), zeros)
        return jax.lax.scan(add, start, (jnp.arange(count), parts))[0]

    def interleaved(x: jax.Array) -> jax.Array:
        """Puts every `count`-th row from row i into part i, so no row moves between devices."""
        return x.reshape(len(x) // count, count, *x.shape[1:]).swapaxes(0, 1)

    def adjacent(x: jax.Array) -> jax.Array:
        """Puts adjacent rows into a part, as T5X does; this affects each part's divisor."""
        return x.reshape(count, len(x) // count, *x.shape[1:])

    return gradients_of


def make_evaluation_step(parts: Parts) -> Callable[[Any, Batch], Metrics]:
    """Returns the jitted evaluation (params, batch) -> metrics, without dropout."""
    model, config, mesh = parts.model, parts.config, parts.mesh
    of_batch = model_loss(model).of_batch
    shardings = parts.shardings.params, rows(mesh)

    @partial(
        jax.jit,
        in_shardings=shardings,
        out_shardings=replicated(mesh),
        compiler_options=options(mesh, config.compiler_options),
    )
    def evaluation_step(params: Any, batch: Batch) -> Metrics:
        with tracing_on(mesh, config.mesh.rules):
            merged = parts.tuning.merged(params)
            output = run_model(model, used_parameters(model, merged, parts.shares), batch)
        return {**of_batch(output, batch, config.loss)[1], **sequence_accuracy(output, batch)}

    return evaluation_step
