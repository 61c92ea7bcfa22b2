"""Computes a run's batch size and microbatches from sizes given in tokens."""

import math

from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from trainer.config import field_paths
from trainer.config.phases import phases_of
from trainer.config.run import Config

# Fields in tokens -> the fields in rows or parts that they determine.
_IMPLIED_BY_TOKENS = {
    "tokens_per_batch": "batch_size",
    "tokens_per_microbatch_per_replica": "microbatches",
}
# Fields in tokens -> the fields that a run may have in their place.
ALTERNATIVES = {**_IMPLIED_BY_TOKENS, "train_tokens": "train_steps"}


def batch_of_tokens(
    config: Config, origins: dict[str, str], lengths: Lengths, devices: int | None = None
) -> Config:
    """Returns `config` with `batch_size` and `microbatches` computed from tokens, if given.

    `devices` is the number of devices in the run, by default of those present.

    Source: Mesh TensorFlow, `utils.compute_batch_size` and `serialize_num_microbatches`.
    """
    length = max(lengths.inputs, lengths.targets)
    for tokens, implied in _IMPLIED_BY_TOKENS.items():
        if getattr(config, tokens) is None or origins.get(implied) != "command line":
            continue
        if not origins.get(tokens, "").startswith("the run "):
            raise UserError(f"--{tokens} and --{implied} are alternatives: set only one")
        config = field_paths.replace(config, tokens, None)  # a branch replaces its run's
        del origins[tokens]
    if config.tokens_per_batch is not None:
        rows, rest = divmod(config.tokens_per_batch, length)
        if rest:
            raise UserError(
                f"--tokens_per_batch={config.tokens_per_batch} is not a multiple of the row length "
                f"{length}: use {rows * length or length}"
            )
        config = field_paths.implied(config, origins, {"batch_size": rows}, "tokens_per_batch")
    if config.tokens_per_microbatch_per_replica is not None:
        if devices is None:
            import jax

            devices = jax.device_count()
        mesh = config.mesh.sizes(devices)
        replicas = mesh["data"] * mesh["fsdp"]
        phases = phases_of(config)
        sizes, most = phases.sizes, config.tokens_per_microbatch_per_replica
        # A batch that cannot be divided evenly is rejected later, like any other.
        if all(size % replicas == 0 for size in sizes):
            common = math.gcd(*sizes) // replicas
            fewest = 1  # in every phase, with at least a row in each part
            for phase in phases.phases:
                longer = max(phase.lengths.inputs, phase.lengths.targets) or length
                fewest = max(fewest, math.ceil(phase.rows // replicas / max(1, most // longer)))
            counts = (count for count in range(fewest, common + 1) if common % count == 0)
            parts = next(counts, None)
            if parts is None:
                raise UserError(
                    f"--tokens_per_microbatch_per_replica={most}: a batch needs {fewest} parts, "
                    f"but all batches of --batch_schedule={config.batch_schedule} divide into "
                    f"{common} at most: choose other numbers of rows"
                )
            by = "tokens_per_microbatch_per_replica"
            config = field_paths.implied(config, origins, {"microbatches": parts}, by)
    return config
