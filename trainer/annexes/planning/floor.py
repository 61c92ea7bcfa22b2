"""The floor of a training step: what a chip's products and memory need, whatever the program."""

import math

from trainer.annexes.planning.devices import Chip
from trainer.annexes.planning.gpus import Gpu
from trainer.config.run import Config
from trainer.engine.cost import parameter_count, products_per_step

# Bytes that an update reads and writes for each parameter: the master parameter once each way, and
# its gradient; factored moments are smaller by far.
_BYTES_OF_UPDATE = 12


def floor(
    config: Config, lengths: tuple[int, int], chip: Chip | Gpu, devices: int, peak: float
) -> float:
    """Returns the least seconds that a step can take on `devices` chips of `peak` FLOP/s each.

    Counts products at the peak, with half of causal attention's pairs, and the bytes of an update
    in shares. Attention's backward pass computes the logits once more. Three of its products sum
    over a head's channels; they fill only as many rows of the matrix unit. Norms, other passes over
    memory and collectives take nothing.
    """
    kernels, attention = products_per_step(
        config.model, max(config.phases.sizes), *lengths, halve_causal=True
    )
    head = config.model.head_dim
    filled = math.ceil(head / chip.matrix_unit) * chip.matrix_unit / head
    products = 6 * kernels + (4 + 3 * filled) * attention
    update = _BYTES_OF_UPDATE * parameter_count(config.model) / chip.memory_bandwidth
    return (products / peak + update) / devices
