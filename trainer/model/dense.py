"""Settings, matrix products and dropout shared by a model's modules.

Dimensions: B batch, L length, D input features, F output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint
from jax import Array

from trainer.model.device import AUTO, Device
from trainer.model.parameters import KERNEL, TABLE, Use, parameter
from trainer.model.parametrisation import Initializer, StandardParametrisation


@dataclass(frozen=True)
class Shared:
    """Settings of a whole model; fields not described here are as in `ModelConfig`.

    `dtype` ("float32" or "bfloat16") is the type of activations and matrix operands; parameters are
    always float32. `dense_bias` adds biases to attention projections, `out_bias` decides otherwise
    for the last one, `scale_embeddings` multiplies embedded tokens by sqrt(emb_dim), and
    `broadcast_dropout` lets a row's positions share a draw.
    """

    emb_dim: int
    vocab_size: int
    dtype: str
    dropout_rate: float
    parametrisation: StandardParametrisation
    dense_bias: bool = False
    out_bias: bool | None = None
    scale_embeddings: bool = False
    broadcast_dropout: bool = True
    scan_layers: bool = False
    remat: str = "none"
    attention: str = AUTO
    softmax_dtype: str = AUTO
    attention_weights: str = "softmax"
    attention_softcap: float | None = None

    def dense(
        self,
        features: int,
        axes: tuple[str, str],
        initializer: Initializer,
        name: str,
        float32_output: bool = False,
        bias: bool | None = None,
        use: Use = KERNEL,
    ) -> Dense:
        """Returns a `Dense` of the model's dtype; `bias=None` means `dense_bias`."""
        bias = self.dense_bias if bias is None else bias
        return Dense(features, axes, initializer, self.dtype, float32_output, bias, use, name=name)

    def dropout(self, broadcast_length: bool = True) -> Dropout:
        """Returns dropout; a row's positions share a draw if both `broadcast_` flags are set."""
        broadcast = broadcast_length and self.broadcast_dropout
        return Dropout(self.dropout_rate, broadcast)


class Buildable:
    """Base of parts that are modules: frozen dataclasses whose `run` is the module's call.

    `run` gets the module, which holds parameters and settings, then the `settings` passed to
    `build`, then the inputs.
    """

    def build(self, shared: Shared, name: str | None = None, *settings: Any) -> nn.Module:
        return Built(self, shared, settings, name=name)


class Built(nn.Module):
    """The module of a `Buildable`."""

    part: Any
    shared: Shared
    settings: tuple[Any, ...] = ()

    @nn.compact
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.part.run(self, *self.settings, *inputs, **named)


def tracing_device() -> Device:
    """Returns the device of `tracing_on`'s mesh, present or not, or else JAX's default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return Device(device.device_kind if device else jax.devices()[0].device_kind)


def rows_divided(x_BLD: Array) -> Array:
    """Returns residual states whose rows are divided over devices like the batch.

    Without this, the compiler divides channels over "fsdp" as in kernels, and products move
    activations.
    """
    if not nn.get_logical_axis_rules():
        return x_BLD
    return with_logical_constraint(x_BLD, ("batch", None, None))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_float32(subscripts: str, x: Array, y: Array) -> Array:
    """Returns an einsum whose sums and result are float32, whatever the operands' dtype.

    The backward pass rounds the incoming gradient to the operands' dtype, which keeps both products
    of a bfloat16 model in bfloat16. `subscripts` must be explicit ("blhk,bshk->bhls").
    """
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _einsum_forward(subscripts: str, x: Array, y: Array) -> tuple[Array, Any]:
    return einsum_float32(subscripts, x, y), (x, y)


def _einsum_backward(subscripts: str, operands: Any, gradient: Array) -> tuple[Any, ...]:
    x, y = operands
    inputs, output = subscripts.split("->")
    x_letters, y_letters = inputs.split(",")
    x_gradient = jnp.einsum(f"{output},{y_letters}->{x_letters}", gradient.astype(y.dtype), y)
    y_gradient = jnp.einsum(f"{x_letters},{output}->{y_letters}", x, gradient.astype(x.dtype))
    return x_gradient, y_gradient


einsum_float32.defvjp(_einsum_forward, _einsum_backward)


def softcapped(x: Array, cap: float | None) -> Array:
    """Returns `cap * tanh(x / cap)`, or `x` itself if the cap is None.

    Source: Gemma 2 (arXiv:2408.00118), section 2.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


def sum_leading(x: Array, axes: int) -> Array:
    """Returns the float32 sum over the first `axes` axes.

    A product with ones on a CPU: 0.5 ns per element; XLA's own sum takes 5 to 10 (dev/LOG.md).
    """
    ones = jnp.ones(x.shape[:axes], x.dtype)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: jnp.tensordot(ones, x, axes, preferred_element_type=jnp.float32),
        default=lambda x: jnp.sum(x, axis=tuple(range(axes)), dtype=jnp.float32),
    )


class Dropout(nn.Module):
    """Makes the same draws as `flax.linen.Dropout`, but keeps only them for the backward pass.

    `broadcast`: the second-to-last axis shares a draw. Flax expands the draws to the operand's
    shape first, so a scan keeps a mask of that size.
    """

    rate: float
    broadcast: bool

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        if self.rate == 0 or deterministic:
            return x
        shape = (*x.shape[:-2], 1, x.shape[-1]) if self.broadcast else x.shape
        kept = jax.random.bernoulli(self.make_rng("dropout"), 1.0 - self.rate, shape)
        return _dropped(1.0 - self.rate, x, kept)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dropped(share: float, x: Array, kept: Array) -> Array:
    return jnp.where(kept, x / share, 0)


def _dropped_forward(share: float, x: Array, kept: Array) -> tuple[Array, Any]:
    return _dropped(share, x, kept), kept


def _dropped_backward(share: float, kept: Array, gradient: Array) -> tuple[Any, ...]:
    # The same order as in automatic differentiation, for bitwise equal results.
    return jnp.where(kept, gradient, 0) / share, None


_dropped.defvjp(_dropped_forward, _dropped_backward)


class Dense(nn.Module):
    """Maps [B, L, D] to [B, L, F]: `x @ kernel`, plus a bias if `use_bias` is set.

    The kernel is 2-D even if F or D is heads times head size: T5X stores that shape, and Adafactor
    factors it. `float32_output` keeps the float32 sums of a bfloat16 product.
    """

    features: int
    axes: tuple[str, str]
    initializer: Initializer
    dtype: str
    float32_output: bool = False
    use_bias: bool = False
    use: Use = KERNEL

    def __call__(self, x_BLD: Array) -> Array:
        kernel_DF, bias_F = self.weights(x_BLD.shape[-1])
        product = einsum_float32 if self.float32_output else jnp.einsum
        return _biased(product("bld,df->blf", x_BLD.astype(self.dtype), kernel_DF), bias_F)

    @nn.compact
    def weights(self, width: int) -> tuple[Array, Array | None]:
        """Returns the kernel for inputs of `width` channels, in `dtype`, and the bias if used."""
        shape, zeros = (width, self.features), nn.initializers.zeros
        kernel_DF = parameter(self, self.use, "kernel", self.initializer, self.axes, shape)
        bias_F = None
        if self.use_bias:
            bias_F = parameter(self, TABLE, "bias", zeros, self.axes[1:], shape[1:])
        return kernel_DF.astype(self.dtype), bias_F


class Order(NamedTuple):
    """How several projections share the channels of one array.

    The channels are divided among `devices`. Each device has `pieces` pieces of each projection:
    the first of every projection, then the second of every projection, and so on.
    """

    devices: int
    pieces: int


def project_joined(projections: Sequence[Dense], x_BLD: Array, order: Order) -> Array:
    """Returns equally wide projections as one array, for kernels that read them where they lie."""
    kernels, biases = zip(
        *(projection.weights(x_BLD.shape[-1]) for projection in projections), strict=True
    )
    kernel_DF = side_by_side(kernels, order)
    out_BLF = jnp.einsum("bld,df->blf", x_BLD.astype(kernel_DF.dtype), kernel_DF)
    return _biased(out_BLF, None if biases[0] is None else side_by_side(biases, order))


def side_by_side(arrays: Sequence[Array], order: Order) -> Array:
    """Returns arrays joined along the last axis.

    The compiler reads pieces where they lie; a transposition would be a copy.
    """
    shape = arrays[0].shape[:-1]
    divided = [array.reshape(*shape, order.devices, -1) for array in arrays]
    pieces = zip(*(jnp.split(each, order.pieces, -1) for each in divided), strict=True)
    return jnp.concatenate([piece for of_all in pieces for piece in of_all], -1).reshape(*shape, -1)


def _biased(out: Array, bias: Array | None) -> Array:
    return out if bias is None else out + bias.astype(out.dtype)
