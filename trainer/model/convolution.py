"""Causal depthwise convolutions: each channel by itself, over the positions behind it.

Dimensions: B batch, L length, C channels, D model, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.model.dense import Shared, parameter
from trainer.model.masks import Rows
from trainer.model.norms import LayerNorm


def behind(x_BLC: jax.Array, steps: int, segment_BL: jax.Array | None) -> jax.Array:
    """At each position, what stands `steps` before it in its row; 0 where nothing does.

    With `segment_BL` what belongs to another packed example is 0 too.
    """
    if not steps:
        return x_BLC
    length = x_BLC.shape[1]
    there_BLC = jnp.pad(x_BLC, ((0, 0), (steps, 0), (0, 0)))[:, :length]
    if segment_BL is None:
        return there_BLC
    segment_there_BL = jnp.pad(segment_BL, ((0, 0), (steps, 0)))[:, :length]
    return there_BLC * (segment_there_BL == segment_BL)[..., None].astype(x_BLC.dtype)


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
        out_BLC = jnp.zeros_like(x_BLC)
        for step in range(self.spec.width):
            initial = nn.initializers.constant(0.5 / self.spec.width if step else 0.5)
            tap_C = parameter(self, f"tap_{step}", initial, ("joined_kv",), x_BLC.shape[-1:])
            out_BLC += behind(x_BLC, step, segment_BL) * tap_C.astype(self.shared.dtype)
        return out_BLC


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
            self, "depthwise_kernel", initializer, ("unmodeled", self.axes[0]),
            (self.width, channels),
        ).astype(shared.dtype)  # fmt: skip
        bias_C = parameter(
            self, "depthwise_bias", nn.initializers.zeros, self.axes[:1], (channels,)
        )
        out_BLC = jnp.zeros_like(x_BLC) + bias_C.astype(shared.dtype)
        for step in range(self.width):
            out_BLC += behind(x_BLC, step, segment_BL) * kernel_WC[self.width - 1 - step]
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
