"""The compiled parts of a run, made once from its configuration."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.mesh import check_dimensions
from trainer.engine.sharding import (
    describe,
    host_part,
    like_parameters,
    make_mesh,
    parameter_shardings,
    replicated,
)
from trainer.engine.step import (
    Metrics,
    TrainState,
    make_evaluation_step,
    make_train_step,
    zero_metrics,
)
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, decayed, init_params, logical_axes
from trainer.optim.optimizer import make_optimizer
from trainer.setup import Run


class Program:
    """The compiled parts of a run: mesh, initial state, training and evaluation steps.

    Attributes:
      mesh: the devices of all processes.
      host_part: which part of each batch's rows this process makes.
      shardings: where each array of a state is, a TrainState of shardings.

    Raises:
      UserError: the mesh does not fit the devices, or the model or the batch the mesh.
    """

    def __init__(self, run: Run):
        config = run.config
        _enable_compilation_cache()
        sizes = config.mesh.sizes(jax.device_count())
        check_dimensions(
            sizes, config.mesh.rules, config.model, config.batch_size, config.microbatches
        )
        self.mesh = make_mesh(config.mesh)
        self.host_part = host_part(self.mesh)
        self._spec = model_spec(config.model)
        self._seed, self._rules = config.seed, config.mesh.rules
        axes = logical_axes(self._spec)
        self._optimizer = make_optimizer(config.optimizer, axes, decayed(self._spec))
        self._model = build_model(self._spec)
        self._shapes: TrainState = jax.eval_shape(self._initial_state)
        self.shardings = self._place(axes)
        self.train_step = make_train_step(
            self._model, self._optimizer, config, self.mesh, self.shardings
        )
        self.evaluation_step = make_evaluation_step(
            self._model, config, self.mesh, self.shardings.params
        )
        # On every device of every process, as the step's own metrics are.
        self._zero_metrics = jax.jit(
            lambda: zero_metrics(self._model), out_shardings=self.shardings.metrics
        )

    def initial_state(self) -> TrainState:
        """The state of step 0, a function of the configuration alone: the same on any mesh."""
        return jax.jit(self._initial_state, out_shardings=self.shardings)()

    def state_of(self, params: Any, step: int) -> TrainState:
        """The state of these parameters after `step` updates that left nothing else behind; takes
        over their memory."""
        make = jax.jit(self._state_of, donate_argnums=0, out_shardings=self.shardings)
        return make(params, np.int32(step))

    def zero_metrics(self) -> Metrics:
        """The metrics of no step."""
        return self._zero_metrics()

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, without computing one."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._shapes,
            self.shardings,
        )

    def describe(self) -> tuple[str, str]:
        """A (subject, text) line: the mesh, and what a device holds."""
        return describe(self.mesh, self._rules, self.abstract_state())

    def _place(self, axes: Any) -> TrainState:
        shapes = self._shapes
        params = parameter_shardings(self.mesh, self._rules, shapes.params, axes)
        everywhere: Any = replicated(self.mesh)
        return TrainState(
            step=everywhere,
            params=params,
            opt_state=like_parameters(self.mesh, shapes.opt_state, shapes.params, params),
            metrics=jax.tree.map(lambda _: everywhere, shapes.metrics),
            guard=jax.tree.map(lambda _: everywhere, shapes.guard),
        )

    def _initial_state(self) -> TrainState:
        params = init_params(self._spec, jax.random.key(self._seed))
        return self._state_of(params, jnp.zeros((), jnp.int32))

    def _state_of(self, params: Any, step: jax.Array) -> TrainState:
        return TrainState(
            step=step,
            params=params,
            opt_state=self._optimizer.init(params),
            metrics=zero_metrics(self._model),
        )


def _enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, so that a restart is at its first step in seconds."""
    default = os.path.join(os.path.expanduser("~"), ".cache", "palimpsest", "xla")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", default)
