"""The compiled parts of a run, made once from its configuration."""

import os

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params
from trainer.optimizer import make_optimizer
from trainer.setup import Run
from trainer.step import (
    Metrics,
    TrainState,
    device_mesh,
    make_evaluation_step,
    make_train_step,
    zero_metrics,
)


class Program:
    """The compiled parts of a run: mesh, initial state, training and evaluation steps."""

    def __init__(self, run: Run):
        config = run.config
        _enable_compilation_cache()
        self.mesh = device_mesh(config.batch_size)
        self._spec = model_spec(config.model)
        self._optimizer = make_optimizer(config.optimizer)
        self._seed = config.seed
        self._model = build_model(self._spec)
        self.train_step = make_train_step(self._model, self._optimizer, config, self.mesh)
        self.evaluation_step = make_evaluation_step(self._model, config.loss, self.mesh)

    def initial_state(self) -> TrainState:
        """The state of step 0, a function of the configuration alone."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(self._initial_state, out_shardings=everywhere)()

    def zero_metrics(self) -> Metrics:
        """The metrics of no step."""
        return zero_metrics(self._model)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, without computing one."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
            jax.eval_shape(self._initial_state),
        )

    def _initial_state(self) -> TrainState:
        params = init_params(self._spec, jax.random.key(self._seed))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self._optimizer.init(params),
            metrics=self.zero_metrics(),
        )


def _enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, so that a restart is at its first step in seconds."""
    default = os.path.join(os.path.expanduser("~"), ".cache", "palimpsest", "xla")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", default)
