"""What a model costs: parameters and floating-point operations."""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp

from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params


def parameter_count(config: ModelConfig) -> int:
    """The number of trainable parameters. Nothing is allocated."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_step(
    config: ModelConfig, batch_size: int, encoder_length: int, decoder_length: int
) -> int:
    """Floating-point operations a training step needs, forward and backward, over all devices.

    Counted: 2 for each kernel element and position forward and twice that backward, and 4 (12
    with the backward pass) for each query, key and attention channel, masked or not, padded or
    not. Of experts the one that a token goes through, not the room that stays empty. Not counted:
    embedding look-ups, norms, softmax, the optimizer. The length of a stack that the model lacks
    is ignored. Utilisation is this, by step time, by the device's peak.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    encoder_tokens = batch_size * encoder_length
    decoder_tokens = batch_size * decoder_length
    matmul_elements = 0
    shapes = parameter_shapes(config)
    for path, shape in shapes.items():
        if path[-1].endswith("kernel") or path[-1].startswith("tap_"):
            # Keys and values of cross attention are projected from the encoder's positions.
            on_encoder = path[0] in ("encoder", "mlm_head") or (
                "encoder_decoder_attention" in path and path[-2] in ("key", "value")
            )
            tokens = encoder_tokens if on_encoder else decoder_tokens
            if path[0] == "order_head":  # looks at one position a row
                tokens = batch_size
            # A token goes through one expert.
            own_shape = shape[1:] if "experts" in path else shape
            matmul_elements += math.prod(own_shape) * tokens
    if not any("logits_dense" in path for path in shapes):
        predicted = encoder_tokens if config.architecture == "encoder" else decoder_tokens
        matmul_elements += config.vocab_size * config.emb_dim * predicted

    spec = model_spec(config)
    products = 0
    for role, tokens, length in (
        ("encoder", encoder_tokens, encoder_length),
        ("decoder", decoder_tokens, decoder_length),
    ):
        stack = getattr(spec, role, None)
        for layer in stack.layers if stack else ():
            products += layer.mixer.products_per_pair * tokens * length
            if layer.cross_mixer is not None:
                products += layer.cross_mixer.products_per_pair * tokens * encoder_length
    return 6 * (matmul_elements + products)


@lru_cache
def parameter_shapes(config: ModelConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path to shape, for each parameter. Nothing is allocated."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    params = jax.eval_shape(lambda key: init_params(model_spec(config), key), key)
    return {
        tuple(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
