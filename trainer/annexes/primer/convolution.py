"""Causal depthwise convolutions: each channel is convolved separately, over earlier positions.

Dimensions: B batch, L length, C channels, D model, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from trainer.model.attention import DotProductAttention, self_attention
from trainer.model.cache import Cache
from trainer.model.dense import Buildable, Built, sum_leading
from trainer.model.feedforward import FeedForward
from trainer.model.masks import Rows
from trainer.model.norms import LayerNorm
from trainer.model.parameters import KERNEL, TABLE, TAP, parameter
from trainer.model.spec import LayerSpec


@jax.custom_vjp
def depthwise(x_BLC: Array, kernel_WC: Array, segment_BL: Array | None) -> Array:
    """Returns, at position t, the sum over w of `kernel_WC[w]` times `x_BLC` at t - w.

    Positions before the row count as 0; with `segment_BL`, so do other packed examples.
    """
    shifted = _shifted(x_BLC, len(kernel_WC), segment_BL, ahead=False)
    return sum(map(jnp.multiply, shifted, kernel_WC), jnp.zeros_like(x_BLC))


def _shifted(x_BLC: Array, width: int, segment_BL: Array | None, ahead: bool) -> Iterator[Array]:
    """Yields `x_BLC` shifted by 0 to `width` - 1 positions: later, or earlier with `ahead`."""
    length, margin = x_BLC.shape[1], (0, width - 1) if ahead else (width - 1, 0)
    # Pad only once: XLA's CPU compiler writes every pad to memory, but reads slices in place.
    padded_BPC = jnp.pad(x_BLC, ((0, 0), margin, (0, 0)))
    yield x_BLC
    for steps in range(1, width):
        window = slice(steps, steps + length) if ahead else slice(width - 1 - steps, -steps)
        shifted_BLC = padded_BPC[:, window]
        if segment_BL is not None:
            shifted_segment_BL = jnp.pad(segment_BL, ((0, 0), margin))[:, window]
            shifted_BLC *= (shifted_segment_BL == segment_BL)[..., None].astype(x_BLC.dtype)
        yield shifted_BLC


def _depthwise_forward(
    x_BLC: Array, kernel_WC: Array, segment_BL: Array
) -> tuple[Array, tuple[Array, ...]]:
    return depthwise(x_BLC, kernel_WC, segment_BL), (x_BLC, kernel_WC, segment_BL)


def _depthwise_backward(
    operands: tuple[Array, ...], gradient_BLC: Array
) -> tuple[Array | None, ...]:
    # Each input affects its own and later outputs, so the same shifted gradients give the
    # gradients of both input and kernel.
    x_BLC, kernel_WC, segment_BL = operands
    shifted = list(_shifted(gradient_BLC, len(kernel_WC), segment_BL, ahead=True))
    x_gradient_BLC = sum(map(jnp.multiply, shifted, kernel_WC), jnp.zeros_like(x_BLC))
    kernel_gradient_WC = jnp.stack([sum_leading(x_BLC * each_BLC, 2) for each_BLC in shifted])
    return x_gradient_BLC, kernel_gradient_WC.astype(kernel_WC.dtype), None


depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def _over_rows(
    module: nn.Module, x_BLC: Array, kernel_WC: Array, rows: Rows, reset: bool, cache: Cache | None
) -> Array:
    """Applies `depthwise`, including earlier positions in a cache; `reset` separates examples."""
    if cache is None:
        return depthwise(x_BLC, kernel_WC, rows.segment_BL if reset else None)
    x_BLC *= (rows.segment_BL > 0)[..., None].astype(x_BLC.dtype)  # padding before the prompt
    all_BPC = cache.last_inputs(module, x_BLC, len(kernel_WC))
    return depthwise(all_BPC, kernel_WC, None)[:, len(kernel_WC) - 1 :]


@dataclass(frozen=True)
class HeadConvolution(Buildable):
    """A convolution of projected queries, keys or values, with one tap per channel and step.

    With `reset` packed examples do not see one another. Upstream, the first two positions of an
    example see the previous example. Each tap is its own parameter, as upstream, because
    Adafactor scales updates by tensor.

    Source: So et al. 2021 (arXiv:2109.08668), section 3.1; initial taps from the authors' code.
    """

    width: int = 3
    reset: bool = True

    def run(self, module: Built, x_BLC: Array, rows: Rows, cache: Cache | None = None) -> Array:
        taps, shape = [], x_BLC.shape[-1:]
        for step in range(self.width):
            start = nn.initializers.constant(0.5 / self.width if step else 0.5)
            taps.append(parameter(module, TAP, f"tap_{step}", start, ("joined_kv",), shape))
        kernel_WC = jnp.stack(taps).astype(module.shared.dtype)
        return _over_rows(module, x_BLC, kernel_WC, rows, self.reset, cache)


@dataclass(frozen=True)
class _SeparableConvolution(Buildable):
    """Depthwise convolution [W, C], current position last, then a projection, both with biases."""

    width: int
    features: int
    axes: tuple[str, str]
    reset: bool

    def run(self, module: Built, x_BLC: Array, rows: Rows, cache: Cache | None) -> Array:
        shared, channels, axes = module.shared, x_BLC.shape[-1], self.axes
        start, zeros = shared.parametrisation.feed_forward(), nn.initializers.zeros
        own, shape = ("unmodeled", axes[0]), (self.width, channels)
        kernel_WC = parameter(module, KERNEL, "depthwise_kernel", start, own, shape)
        bias_C = parameter(module, TABLE, "depthwise_bias", zeros, axes[:1], (channels,))
        kernel_WC = kernel_WC.astype(shared.dtype)[::-1]
        out_BLC = _over_rows(module, x_BLC, kernel_WC, rows, self.reset, cache)
        out_BLC += bias_C.astype(shared.dtype)
        return shared.dense(self.features, axes, start, "pointwise", bias=True)(out_BLC)


@dataclass(frozen=True)
class ConvolutionBranch(FeedForward):
    """The Evolved Transformer's convolutions, which come between two attention sublayers.

    A wide and a narrow branch run in parallel; their sum is normalised and convolved again. A
    position with input id 0, the first of each example, counts as zeros. For `reset` see
    `HeadConvolution`.

    Source: So et al. 2019 (arXiv:1901.11117), figure 3; Mesh TensorFlow for widths and the mask.
    """

    left_width: int = 11
    right_width: int = 7
    out_width: int = 7
    reset: bool = True
    pointwise = False

    def run(
        self,
        module: Built,
        x_BLD: Array,
        rows: Rows,
        deterministic: bool,
        cache: Cache | None = None,
    ) -> Array:
        shared, width = module.shared, module.shared.emb_dim

        def convolve(x_BLC: Array, width: int, features: int, name: str) -> Array:
            if rows.input_BL is not None:
                x_BLC *= (rows.input_BL != 0)[..., None].astype(x_BLC.dtype)
            axes = ("mlp", "embed") if name == "out" else ("embed", "mlp")
            part = _SeparableConvolution(width, features, axes, self.reset)
            return part.build(shared, name)(x_BLC, rows, cache)

        left_BLC = nn.relu(convolve(x_BLD, self.left_width, 2 * width, "left"))
        right_BLC = convolve(x_BLD, self.right_width, width // 2, "right")
        right_BLC = jnp.pad(right_BLC, ((0, 0), (0, 0), (0, 2 * width - width // 2)))
        norm = LayerNorm(1e-6).build(shared, "layer_norm")
        return convolve(norm(left_BLC + right_BLC), self.out_width, width, "out")


def multi_dconv_head_attention(config: Any, options: Any) -> DotProductAttention:
    """Returns Primer's attention, which convolves queries, keys and values."""
    return self_attention(config, convolution=HeadConvolution(reset=not config.upstream_compat))


def with_shared_queries(config: Any, options: Any) -> DotProductAttention:
    """Returns Primer's attention with queries projected from keys, as in the released code."""
    return replace(multi_dconv_head_attention(config, options), shared_query_key=True)


def evolved_layers(config: Any, second: LayerSpec) -> tuple[LayerSpec, ...]:
    """Returns the Evolved Transformer's layers, two per block.

    The first layer has convolutions, and twice as many heads of half the size; `second` is given.
    """
    first = replace(
        second,
        mixer=DotProductAttention(2 * config.num_heads, config.head_dim // 2),
        feed_forward=ConvolutionBranch(reset=not config.upstream_compat),
    )
    return (first, second) * int(config.num_decoder_layers)
