"""Writes a tiny checkpoint of this trainer with random parameters and Adafactor's moments."""

import dataclasses

from tests.support.runs import config_of, stub
from tests.support.t5x_files import STEP, D, V, moments, parameters

__all__ = ["MOMENTS", "PARAMETERS", "STEP", "D", "V", "write"]

PARAMETERS = parameters()
MOMENTS = moments(PARAMETERS, 8)


def write(folder):
    """Writes `folder/checkpoint_STEP` and returns its path; layers are unstacked."""
    import jax
    import jax.numpy as jnp
    from flax.traverse_util import unflatten_dict

    from trainer.checkpoints.checkpoint import Checkpoints
    from trainer.engine.program import Program

    flags = (f"--model.vocab_size={V}", "--optimizer.min_dim_size_to_factor=8")
    run = stub(config_of(*flags, f"--model_dir={folder}"))
    state = Program(run).initial_state()

    def tree(kind):
        names = {name: MOMENTS[f"{name}/{kind}"] for name in PARAMETERS} if kind else PARAMETERS
        return jax.tree.map(jnp.asarray, unflatten_dict(names, sep="/"))

    factored, between, schedule, *rest = state.opt_state
    count = jnp.asarray(STEP, jnp.int32)
    factored = factored._replace(**{kind: tree(kind) for kind in ("v", "v_row", "v_col")})
    opt_state = factored._replace(count=count), between, schedule._replace(count=count), *rest
    made = dataclasses.replace(state, step=count, params=tree(""), opt_state=opt_state)
    checkpoints = Checkpoints(str(folder), run.config.checkpoint)
    checkpoints.save(STEP, made, run)
    checkpoints.close()
    return folder / f"checkpoint_{STEP}"
