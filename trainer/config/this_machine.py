"""Adapts a trained run's configuration to one process on this machine."""

import dataclasses

from tasks.terminal.command_line import UserError
from trainer.config import field_paths, phases
from trainer.config.mesh import MeshConfig
from trainer.config.processes import ProcessesConfig
from trainer.config.run import Config


def on_this_machine(config: Config) -> Config:
    """Returns a run's configuration for this process alone.

    Keeps the run's mesh if the local devices can form it, else all devices divide the rows; keeps
    cuDNN's attention on GPUs only. Only updates have microbatches and schedules of batches; others
    have enough rows for all devices.
    """
    import jax

    config = dataclasses.replace(
        config,
        processes=ProcessesConfig(),
        microbatches=1,
        tokens_per_microbatch_per_replica=None,
    )
    try:
        config.mesh.sizes(jax.device_count())
    except UserError:
        config = dataclasses.replace(config, mesh=MeshConfig())
    sizes = config.mesh.sizes(jax.device_count())
    parts = sizes["data"] * sizes["fsdp"]
    later = (entry.values["rows"] for entry in phases.parse(config.batch_schedule))
    if any(rows % parts for rows in (config.batch_size, *later)):
        rows = -(-config.batch_size // parts) * parts
        values = {"batch_size": rows, "batch_schedule": "", "tokens_per_batch": None}
        config = field_paths.replace_all(config, values)
    if config.model.attention == "cudnn" and jax.default_backend() != "gpu":
        config = field_paths.replace(config, "model.attention", "einsum")
    return config
