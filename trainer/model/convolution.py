"""Causal depthwise convolutions: each channel by itself, over the positions behind it.

Dimensions: B batch, L length, C channels, D model, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Shared, sum_leading
from trainer.model.masks import Rows
from trainer.model.norms import LayerNorm
from trainer.model.parameters import KERNEL, TABLE, TAP, parameter


@jax.custom_vjp
def depthwise(x_BLC: jax.Array, kernel_WC: jax.Array, segment_BL: jax.Array | None) -> jax.Array:
    """At position t the sum over w of `kernel_WC[w]` times `x_BLC` at t - w.

    Shape and dtype are those of `x_BLC`. What stands before the row, or with `segment_BL` in
    another packed example, counts as 0.
    """
    shifted = _shifted(x_BLC, len(kernel_WC), segment_BL, ahead=False)
    return sum(map(jnp.multiply, shifted, kernel_WC), jnp.zeros_like(x_BLC))


def _shifted(
    x_BLC: jax.Array, width: int, segment_BL: jax.Array | None, ahead: bool
) -> Iterator[jax.Array]:
    """For 0 to `width` - 1 steps: at each position what stands so far before it, or after it."""
    length, margin = x_BLC.shape[1], (0, width - 1) if ahead else (width - 1, 0)
    # Padded once: XLA's CPU compiler writes every pad to memory, slices it reads in place.
    padded_BPC = jnp.pad(x_BLC, ((0, 0), margin, (0, 0)))
    yield x_BLC
    for steps in range(1, width):
        window = slice(steps, steps + length) if ahead else slice(width - 1 - steps, -steps)
        there_BLC = padded_BPC[:, window]
        if segment_BL is not None:
            segment_there_BL = jnp.pad(segment_BL, ((0, 0), margin))[:, window]
            there_BLC *= (segment_there_BL == segment_BL)[..., None].astype(x_BLC.dtype)
        yield there_BLC


def _depthwise_forward(x_BLC, kernel_WC, segment_BL):
    return depthwise(x_BLC, kernel_WC, segment_BL), (x_BLC, kernel_WC, segment_BL)


def _depthwise_backward(operands, gradient_BLC):
    # A position had a part in its own output and in those ahead: the same windows of the gradient
    # give both gradients.
    x_BLC, kernel_WC, segment_BL = operands
    shifted = list(_shifted(gradient_BLC, len(kernel_WC), segment_BL, ahead=True))
    x_gradient_BLC = sum(map(jnp.multiply, shifted, kernel_WC), jnp.zeros_like(x_BLC))
    kernel_gradient_WC = jnp.stack([sum_leading(x_BLC * each_BLC, 2) for each_BLC in shifted])
    return x_gradient_BLC, kernel_gradient_WC.astype(kernel_WC.dtype), None


depthwise.defvjp(_depthwise_forward, _depthwise_backward)


@dataclass(frozen=True)
class HeadConvolution:
    """Of projected queries, keys or values: a tap for each head, channel and step back.

    `reset`: packed examples do not see one another; upstream's first two positions of an example
    see the one before.

    Source: So et al. 2021 (arXiv:2109.08668), section 3.1; initial taps from their code.
    """

    width: int = 3
    reset: bool = True

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _HeadConvolution(self, shared, name=name)


class _HeadConvolution(nn.Module):
    """Each tap is a parameter of its own, as upstream: Adafactor scales by the tensor."""

    spec: HeadConvolution
    shared: Shared

    @nn.compact
    def __call__(self, x_BLC: jax.Array, rows: Rows) -> jax.Array:
        segment_BL = rows.segment_BL if self.spec.reset else None
        taps = []
        for step in range(self.spec.width):
            initial = nn.initializers.constant(0.5 / self.spec.width if step else 0.5)
            shape = x_BLC.shape[-1:]
            taps.append(parameter(self, TAP, f"tap_{step}", initial, ("joined_kv",), shape))
        return depthwise(x_BLC, jnp.stack(taps).astype(self.shared.dtype), segment_BL)


class SeparableConvolution(nn.Module):
    """A depthwise convolution over `width` positions, then a projection; both with biases.

    Maps [B, L, C] to [B, L, features]. Kernel [W, C] holds the current position last.
    """

    width: int
    features: int
    axes: tuple[str, str]
    shared: Shared

    @nn.compact
    def __call__(self, x_BLC: jax.Array, segment_BL: jax.Array | None) -> jax.Array:
        shared, channels = self.shared, x_BLC.shape[-1]
        initializer = shared.parametrisation.feed_forward()
        kernel_WC = parameter(
            self, KERNEL, "depthwise_kernel", initializer, ("unmodeled", self.axes[0]),
            (self.width, channels),
        ).astype(shared.dtype)  # fmt: skip
        bias_C = parameter(
            self, TABLE, "depthwise_bias", nn.initializers.zeros, self.axes[:1], (channels,)
        )
        out_BLC = depthwise(x_BLC, kernel_WC[::-1], segment_BL) + bias_C.astype(shared.dtype)
        project = shared.dense(self.features, self.axes, initializer, "pointwise", bias=True)
        return project(out_BLC)


@dataclass(frozen=True)
class ConvolutionBranch:
    """Where the Evolved Transformer has its convolutions, between two attentions.

    A wide and a narrower branch side by side, their sum normalised, and a third convolution. A
    position whose input id is 0, the first of each example, counts as zeros. `reset` as of
    `HeadConvolution`.

    Source: So et al. 2019 (arXiv:1901.11117), figure 3; Mesh TensorFlow for widths and the mask.
    """

    left_width: int = 11
    right_width: int = 7
    out_width: int = 7
    reset: bool = True
    activations = ()
    bias = None
    routes = False
    exports = ()

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _ConvolutionBranch(self, shared, name=name)


class _ConvolutionBranch(nn.Module):
    spec: ConvolutionBranch
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array, rows: Rows, deterministic: bool) -> jax.Array:
        spec, shared, width = self.spec, self.shared, self.shared.emb_dim
        segment_BL = rows.segment_BL if spec.reset else None

        def convolve(x_BLC: jax.Array, width: int, features: int, name: str) -> jax.Array:
            if rows.input_BL is not None:
                x_BLC *= (rows.input_BL != 0)[..., None].astype(x_BLC.dtype)
            axes = ("mlp", "embed") if name == "out" else ("embed", "mlp")
            return SeparableConvolution(width, features, axes, shared, name=name)(x_BLC, segment_BL)

        left_BLC = nn.relu(convolve(x_BLD, spec.left_width, 2 * width, "left"))
        right_BLC = convolve(x_BLD, spec.right_width, width // 2, "right")
        right_BLC = jnp.pad(right_BLC, ((0, 0), (0, 0), (0, 2 * width - width // 2)))
        norm = LayerNorm(1e-6).build(shared, "layer_norm")
        return convolve(norm(left_BLC + right_BLC), spec.out_width, width, "out")
