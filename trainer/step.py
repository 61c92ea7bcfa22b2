"""The training and evaluation steps: pure functions, jitted over a mesh of devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tasks.command_line import UserError
from trainer.config import Config, LossConfig
from trainer.features import FILLING
from trainer.loss import model_loss
from trainer.model.transformer import Encoder, Transformer

Metrics = dict[str, tuple[jax.Array, jax.Array]]
Batch = dict[str, Any]


@flax.struct.dataclass
class TrainState:
    """Everything a checkpoint holds.

    `step` int32 scalar: updates made. `metrics`: (sum, weight) float32 scalars summed since they
    were last written out, part of the state so that a resumed run writes the same numbers.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    metrics: Metrics


def zero_metrics(model: Transformer | Encoder) -> Metrics:
    """Metrics of no step: those of the model's loss, `gradient_norm` and how full rows are."""
    has_encoder = isinstance(model, Encoder) or model.spec.encoder is not None
    names = [*model_loss(model).metrics, "gradient_norm"]
    names += ["inputs_full"] * has_encoder + ["targets_full"] * isinstance(model, Transformer)
    return {name: (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)) for name in names}


def device_mesh(batch_size: int) -> Mesh:
    """All devices on one axis, "data".

    Raises:
      UserError: the batch does not divide among them.
    """
    devices = jax.devices()
    if batch_size % len(devices):
        raise UserError(f"batch_size {batch_size} does not divide among {len(devices)} devices")
    return Mesh(np.array(devices), ("data",))


def put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Moves a batch to the devices, its rows divided among them."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def make_train_step(
    model: Transformer | Encoder,
    optimizer: optax.GradientTransformation,
    config: Config,
    mesh: Mesh,
) -> Callable[[TrainState, Batch], TrainState]:
    """Returns the jitted update; it takes over the memory of the state it is given."""
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    of_batch = model_loss(model).of_batch

    def loss_of(params, batch: Batch, dropout_key):
        output = model.apply(
            {"params": params},
            batch,
            deterministic=config.model.dropout_rate == 0.0,
            rngs={"dropout": dropout_key},
        )
        return of_batch(output, batch, config.loss)

    @partial(jax.jit, donate_argnums=0, in_shardings=(replicated, rows), out_shardings=replicated)
    def train_step(state: TrainState, batch: Batch) -> TrainState:
        # Keyed by the step, so that a resumed run drops the same units.
        dropout_key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        (_, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            state.params, batch, dropout_key
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        metrics = {
            **metrics,
            "gradient_norm": (optax.global_norm(gradients), jnp.ones((), jnp.float32)),
            **{
                name: (jnp.count_nonzero(batch[feature]), batch[feature].size)
                for name, feature in FILLING.items()
                if feature in batch
            },
        }
        return TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            metrics={
                name: (state.metrics[name][0] + total, state.metrics[name][1] + weight)
                for name, (total, weight) in metrics.items()
            },
        )

    return train_step


def make_evaluation_step(
    model: Transformer | Encoder, loss: LossConfig, mesh: Mesh
) -> Callable[[Any, Batch], Metrics]:
    """Returns the jitted (params, batch) -> metrics, without dropout."""
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    of_batch = model_loss(model).of_batch

    @partial(jax.jit, in_shardings=(replicated, rows), out_shardings=replicated)
    def evaluation_step(params, batch: Batch) -> Metrics:
        output = model.apply({"params": params}, batch, deterministic=True)
        return of_batch(output, batch, loss)[1]

    return evaluation_step
