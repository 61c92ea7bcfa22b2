"""Cost of a model: parameters and floating-point operations."""

from __future__ import annotations

import math

from trainer.model.config import ModelConfig
from trainer.model.parameters import EXPERT_AXIS, ROW, SOURCE, ParameterFacts
from trainer.model.spec import model_spec
from trainer.model.transformer import CROSS_ATTENTION, parameter_facts


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of trainable parameters. Nothing is allocated."""
    return sum(math.prod(facts.shape) for facts in parameter_facts(model_spec(config)).values())


def flops_per_step(
    config: ModelConfig, batch_size: int, encoder_length: int, decoder_length: int
) -> int:
    """Returns the floating-point operations of a training step on all devices together.

    Counted are 2 operations forward and 4 backward for each kernel element and position, and 4 (12
    with the backward pass) for each query, key and attention channel, whether masked or padded.
    Only the expert that a token goes through counts, not unused capacity. Embedding look-ups,
    norms, softmax and the optimizer are not counted. The length of a stack that the model lacks is
    ignored. Utilisation is this number divided by step time and the device's peak.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    spec = model_spec(config)
    encoder_length += config.memory_tokens
    lengths = {"encoder": encoder_length, "decoder": decoder_length}
    tokens = {stack: batch_size * length for stack, length in lengths.items()}
    last = [*spec.stacks][-1]

    def multiplied(path: str, facts: ParameterFacts) -> int:
        """Returns how often each element is multiplied in a forward pass."""
        stack, *inner = path.split("/")
        per = facts.use.multiplied_per
        if per is None:
            return 0
        if per == ROW:
            return batch_size
        if per == SOURCE and CROSS_ATTENTION in inner:
            return tokens["encoder"]
        return tokens[stack if stack in spec.stacks else last]  # heads read the last stack

    products = 0
    for path, facts in parameter_facts(spec).items():
        axes = zip(facts.shape, facts.axes, strict=True)
        elements = math.prod(size for size, axis in axes if axis != EXPERT_AXIS)
        products += elements * multiplied(path, facts)
    if spec.output.tied:
        products += config.vocab_size * config.emb_dim * tokens[last]
    for name, stack in spec.stacks.items():
        for layer in stack.layers:
            products += layer.mixer.products_per_pair * tokens[name] * lengths[name]
            if layer.cross_mixer is not None:
                products += layer.cross_mixer.products_per_pair * tokens[name] * encoder_length
    return 6 * products
