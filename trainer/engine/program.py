"""The compiled program of a run: mesh, state and steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tasks.terminal.command_line import UserError
from trainer.config.mesh import check_dimensions
from trainer.data.run import Run
from trainer.engine import compiled_programs, sharding, step
from trainer.engine.metrics import Metrics
from trainer.engine.norms import Norms
from trainer.engine.step import Batch, Parts, Shares, TrainState
from trainer.engine.trainable import tuning_of
from trainer.model.apart import Apart
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params
from trainer.optim.plateau import set_rate_scale


class Program:
    """The compiled program of a run, made once from its configuration.

    Covers all devices of all processes, or `devices` of a slice that is not attached; for these, it
    can be compiled but not run. Raises a UserError if mesh, model or batch do not fit the devices.

    Attributes:
      host_part: the part of each batch's rows that this process makes.
      shardings: TrainState with the sharding of each array.
      norms: layer-wise norms of an update.
      rules: name of one of `config.mesh.RULES`.
      model_shardings: the sharding of each of the model's own parameters.
      shares: shardings of an update in shares, or None.
    """

    def __init__(self, run: Run, devices: Sequence[jax.Device] | None = None):
        config = run.config
        devices = devices or jax.devices()
        if config.model.attention == "cudnn" and devices[0].platform != "gpu":
            raise UserError(
                "--model.attention=cudnn needs an NVIDIA GPU: use einsum or dot_product here"
            )
        compiled_programs.enable()
        sizes = config.mesh.sizes(len(devices))
        rows = config.phases.sizes
        check_dimensions(sizes, config.mesh.rules, config.model, rows, config.microbatches)
        self.mesh = sharding.make_mesh(config.mesh, devices)
        self.host_part = sharding.host_part(self.mesh)
        self.spec = model_spec(config.model)
        self.rules = config.mesh.rules
        self._seed, self._config = config.seed, config
        # Each adds features that are computed on the devices to a batch there.
        self.features: list[Callable[[Batch], Batch]] = []
        self.tuning = tuning_of(config, self.spec)
        self._optimizer = self.tuning.optimizer()
        self._model = build_model(self.spec)
        self._initial = Apart(
            self._initial_state, compiled_programs.options_of_initial_arrays(self.mesh)
        )
        self._shapes: TrainState = self._initial.shapes
        params = sharding.parameter_shardings(
            self.mesh, self.rules, self._shapes.params, self.tuning.axes
        )
        self.shares: Shares | None = None
        if sharding.divides_update(config.mesh, self.mesh) and self.tuning.all_learn:
            own = sharding.divided_over_data(
                self.mesh, self._shapes.params, params, self.tuning.axes
            )
            self.shares, params = Shares(own, params), own
        self.shardings = self._shardings(params)
        self.model_shardings = self.tuning.own(self.shardings.params)
        parts = Parts(
            self._model,
            self._optimizer,
            config,
            self.mesh,
            self.shardings,
            self.tuning,
            self.shares,
        )
        self.train_step = step.make_train_step(parts)
        self.evaluation_step = step.make_evaluation_step(parts)
        self._merged = jax.jit(self.tuning.merged, out_shardings=self.model_shardings)
        self.norms = Norms(parts, self.tuning.axes, self._shapes.params)
        # Replicated on all devices of all processes, like the step's metrics.
        self._zero_metrics = jax.jit(
            lambda: step.zero_metrics(self._model, config), out_shardings=self.shardings.metrics
        )

    def put(self, rows: Batch) -> Batch:
        """Returns a batch on the devices, given this process's part of its rows."""
        batch = sharding.put_part(rows, self.mesh, self.host_part.hosts)
        return functools.reduce(lambda batch, add: add(batch), self.features, batch)

    def initial_state(self) -> TrainState:
        """Returns the state at step 0, which depends on the configuration but not the mesh."""
        return self._initial(self.shardings)

    def state_of(self, params: Any, updates: int) -> TrainState:
        """Returns a new state with the model's own `params`, which are donated, after `updates`."""
        make = jax.jit(self._state_of, donate_argnums=0, out_shardings=self.shardings)
        return make(params, np.int32(updates))

    def merged(self, params: Any) -> Any:
        """Returns the model's own parameters from a state's, with what was added to them."""
        return self._merged(params) if self.tuning.adds else params

    def with_rate_scale(self, state: TrainState, scale: float) -> TrainState:
        """Returns `state` with the schedule multiplied by `scale`, if `plateau.metric` is set."""
        return set_rate_scale(state, scale)

    def zero_metrics(self) -> Metrics:
        """Returns metrics that are all zero."""
        return self._zero_metrics()

    def abstract_state(self) -> TrainState:
        """Returns the shapes, dtypes and shardings of a state, without computing one."""
        return jax.tree.map(
            lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
            self._shapes,
            self.shardings,
        )

    def abstract_model(self) -> Any:
        """Returns the shapes, dtypes and shardings of the model's own parameters."""
        return self.tuning.own(self.abstract_state().params)

    def describe(self) -> tuple[str, str]:
        """Returns a (subject, text) line about the mesh and the state per device."""
        subject, text = sharding.describe(self.mesh, self.rules, self.abstract_state())
        if self.shares and jax.tree.leaves(self.shares.own) != jax.tree.leaves(self.shares.used):
            text += f", update in {self.mesh.shape['data']} shares"
        return subject, text

    def _shardings(self, params: Any) -> TrainState:
        shapes = self._shapes
        everywhere: Any = sharding.replicated(self.mesh)
        return TrainState(
            step=everywhere,
            params=params,
            opt_state=sharding.like_parameters(self.mesh, shapes.opt_state, shapes.params, params),
            metrics=jax.tree.map(lambda _: everywhere, shapes.metrics),
            guard=jax.tree.map(lambda _: everywhere, shapes.guard),
        )

    def _initial_state(self) -> TrainState:
        params = init_params(self.spec, jax.random.key(self._seed))
        return self._state_of(params, jnp.zeros((), jnp.int32))

    def _state_of(self, params: Any, updates: jax.Array) -> TrainState:
        params = self.tuning.begun(params, self._seed)
        return TrainState(
            step=updates,
            params=params,
            opt_state=self._optimizer.init(params),
            metrics=step.zero_metrics(self._model, self._config),
        )
