"""Cost of a model: parameters and floating-point operations."""

import math

from trainer.model.config import ModelConfig
from trainer.model.layer import CROSS_ATTENTION
from trainer.model.masks import AnyMask, known
from trainer.model.mixers import Mixer
from trainer.model.parameters import EXPERT_AXIS, ROW, SOURCE, ParameterFacts
from trainer.model.sparsity import visited_pairs
from trainer.model.spec import LayerSpec, StackSpec, model_spec
from trainer.model.transformer import parameter_facts


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of trainable parameters, without allocating any."""
    return sum(math.prod(facts.shape) for facts in parameter_facts(model_spec(config)).values())


def flops_per_step(
    config: ModelConfig,
    batch_size: int,
    encoder_length: int,
    decoder_length: int,
    halve_causal: bool = False,
) -> int:
    """Returns the number of floating-point operations in a training step, over all devices.

    Counts 2 operations forward and 4 backward for each of `products_per_step`. Utilisation is this
    number divided by step time and the device's peak.
    """
    return 6 * sum(
        products_per_step(config, batch_size, encoder_length, decoder_length, halve_causal)
    )


def products_per_step(
    config: ModelConfig,
    batch_size: int,
    encoder_length: int,
    decoder_length: int,
    halve_causal: bool = False,
) -> tuple[int, int]:
    """Returns the numbers of multiplications in a forward pass: by kernels, and in attention.

    Counts 1 for each kernel element and position, and 2 for each query, key and attention channel,
    even if masked or padded. For attention with a pattern, counts the pairs in visited blocks:
    under a causal mask, no blocks after the query's; with a window, the pairs in it. With
    `halve_causal`, other causal attention counts half of its pairs. Counts only the expert that a
    token goes through, not unused capacity, and only the positions left in a layer. Excludes
    embedding look-ups, norms, softmax and the optimizer, and ignores the length of a stack that the
    model lacks.

    Sources: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B, counts all pairs; MaxText half of
    them since its pull request 1988.
    """
    spec = model_spec(config)
    encoder_length += config.lengthening
    lengths = {"encoder": encoder_length, "decoder": decoder_length}
    tokens = {stack: batch_size * length for stack, length in lengths.items()}
    last = [*spec.stacks][-1]
    left = {name: _lengths_left(stack, lengths[name]) for name, stack in spec.stacks.items()}
    seen = batch_size * left["encoder"][-1] if "encoder" in left else 0

    def multiplied(path: str, facts: ParameterFacts) -> int:
        """Returns how often each element is multiplied in a forward pass."""
        stack, *inner = path.split("/")
        per = facts.use.multiplied_per
        if per is None:
            return 0
        if per == ROW:
            return batch_size
        if per == SOURCE and CROSS_ATTENTION in inner:
            return seen
        if stack not in spec.stacks:  # heads read the last stack
            return tokens[last]
        _, _, index = inner[0].partition("layers_")
        merged, length = _reads_memory(spec.stacks[stack].layers[int(index or 0)]), lengths[stack]
        if index:
            # A layer drops positions after its mixer.
            mixes = inner[1] in ("attention", "self_attention")
            length = left[stack][int(index) + (not mixes)]
        return batch_size * length + (seen if per == SOURCE and merged else 0)

    products = attention = 0
    for path, facts in parameter_facts(spec).items():
        axes = zip(facts.shape, facts.axes, strict=True)
        elements = math.prod(size for size, axis in axes if axis != EXPERT_AXIS)
        products += elements * multiplied(path, facts)
    if spec.output.tied:
        products += config.vocab_size * config.emb_dim * tokens[last]
    for name, stack in spec.stacks.items():
        for layer, length, after in zip(stack.layers, left[name][:-1], left[name][1:], strict=True):
            mask = stack.mask if layer.mask is None else layer.mask
            pairs = self_pairs(layer.mixer, mask, length, halve_causal)
            if _reads_memory(layer):
                pairs += length * left["encoder"][-1]
            attention += round(layer.mixer.products_per_pair * batch_size * pairs)
            if layer.cross_mixer is not None:
                attention += layer.cross_mixer.products_per_pair * length * seen
            own = sum(hook.products_per_position for hook in layer.hooks)
            products += own * batch_size * after
    return products, attention


def _reads_memory(layer: LayerSpec) -> bool:
    return any(hook.reads_memory for hook in layer.hooks)


def _lengths_left(stack: StackSpec, length: int) -> list[int]:
    """Returns the row length before each layer and after the last."""
    lengths = [length]
    for layer in stack.layers:
        for hook in layer.hooks:
            length = hook.length_after(length)
        lengths.append(length)
    return lengths


def self_pairs(mixer: Mixer, mask: AnyMask, length: int, halve_causal: bool = False) -> float:
    """Returns how many query-key pairs self-attention computes per row, averaged over heads."""
    pattern, kernels = getattr(mixer, "pattern", None), known(mask)
    causal = kernels is not None and kernels.causal
    if kernels is not None and kernels.window is not None and kernels.window < length:
        sides = kernels.window - 1, 0 if causal else kernels.reach
        return length + sum(_beside(length, side) for side in sides)
    if pattern is None or pattern.block >= length:
        return length**2 / (2 if causal and halve_causal else 1)
    return visited_pairs(pattern, mixer.num_heads, length, causal)


def _beside(length: int, side: int) -> int:
    """Returns the number of pairs of a row with a key up to `side` positions before its query."""
    side = min(side, length - 1)
    return length * side - side * (side + 1) // 2
