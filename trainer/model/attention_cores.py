"""Attention cores: interchangeable ways to compute attention, and which of them computes one.

The first core that supports a request computes it: the one that `ModelConfig.attention` names, or
for "auto" those of the device; then those for patterns; then products written out. An annex lists
its cores in its annex.toml: in [attention_cores], by the setting that names them, in
[attention_cores.auto.tpu] or gpu for "auto" there, and in [attention_cores.patterned]. No JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.annexes import Registry, every
from trainer.model.device import AUTO, Device
from trainer.model.slot import load
from trainer.model.sparsity import Pattern

EINSUM, DOT_PRODUCT, CUDNN = "einsum", "dot_product", "cudnn"
# Name under which `jax.checkpoint` may keep what a core's backward pass reads.
SAVED = "fused_attention"
# Key in a Pallas kernel's metadata for the tiles that it visits, relative to a causal mask: no
# schedule shows how often the inner loops run.
VISITED = "visited_tiles"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a core is asked to compute. Defaults are the plainest attention, on no device yet.

    Attributes:
      devices: number of devices that share the heads of a row.
      longest: tokens of the longest row on either side; 0 if rows are not known.
      weights: one of `registry.WEIGHT_NAMES`.
      masked: its mask is a `masks.Mask`, which kernels compute themselves.
      capped: logits have a limit.
      by_distance: it has no bias, or one that a table of distance buckets gives.
      added: something else is added to the products.
      watched: other parts read its weights.
      drops: weights are dropped; `drops_by_query`: by each query for itself.
      pattern: blocks of keys that queries see; None means all.
      cached: keys and values of earlier positions come from a cache.
      initial: the model is traced on one token, for its initial values on any device.
    """

    dtype: str
    num_heads: int
    head_dim: int
    device: Device | None = None
    devices: int = 1
    longest: int = 0
    weights: str = "softmax"
    masked: bool = True
    capped: bool = False
    by_distance: bool = True
    added: bool = False
    watched: bool = False
    drops: bool = False
    drops_by_query: bool = False
    pattern: Pattern | None = None
    cached: bool = False
    initial: bool = False


class Reason(NamedTuple):
    """Why a core does not support a request: a field of `ModelConfig`, and what it must be."""

    field: str
    rule: str
    because: str = ""


@dataclass(frozen=True)
class Core:
    """A way to compute attention.

    Attributes:
      name: the value of `ModelConfig.attention` under which it is reported.
      run: "module:function" that maps an `AttentionCall`, queries [B, L, J], and keys and values
        [B, S, G * K], not yet rotated, to mixed values [B, L, J]. In an order of `joined`, it also
        takes [B, L, 3 * J], None, None, or keys and values [B, S, 2 * G * K] as keys and None as
        values.
      supports: returns why it does not support a request; None if it does.
      joined: "module:function" that maps an `AttentionCall` and the heads of keys and values to the
        `Order` in which they share an array; None if the core needs separate ones.
    """

    name: str
    run: str
    supports: Callable[[Request], Reason | None]
    joined: str | None = None

    def __call__(self, *inputs: Any) -> Any:
        return load(self.run)(*inputs)

    def order(self, call: Any, groups: int) -> Any:
        """Returns the `Order` in which the core takes joined projections, or None."""
        return load(self.joined)(call, groups) if self.joined else None


def select(setting: str, request: Request) -> Core:
    """Returns the first core that supports a request."""
    for core in _candidates(setting, request):
        if core.supports(request) is None:
            return core
    raise ValueError("no attention core computes this pattern")


def _candidates(setting: str, request: Request) -> Iterator[Core]:
    if setting != AUTO:
        yield CORES[setting]
    elif request.device is not None:
        yield from every(f"attention_cores.auto.{request.device.platform}")
    if request.pattern is not None:
        yield from every("attention_cores.patterned")
    yield CORES[EINSUM]


def _einsum(request: Request) -> Reason | None:
    patterned = request.pattern is not None and not request.cached
    return Reason("attention_pattern", "'full'") if patterned else None


def _dot_product(request: Request) -> Reason | None:
    if request.cached or request.watched:
        return Reason("attention", f"{AUTO!r} or {EINSUM!r}")
    if request.pattern is not None:
        return Reason("attention_pattern", "'full'", "which computes all blocks")
    if request.drops:
        return Reason("dropout_rate", "0", "which cannot drop weights")
    if request.weights != "softmax":
        return Reason("attention_weights", "'softmax'")
    return Reason("attention_softcap", "unset") if request.capped else None


def _cudnn(request: Request) -> Reason | None:
    fits = request.dtype == "bfloat16" or request.cached
    return _dot_product(request) or (None if fits else Reason("dtype", "'bfloat16'"))


_RUNS = "trainer.model.attention_call:"
CORES = Registry(
    "attention_cores",
    {
        EINSUM: Core(EINSUM, _RUNS + "run_einsum", _einsum),
        DOT_PRODUCT: Core(DOT_PRODUCT, _RUNS + "run_dot_product", _dot_product),
        CUDNN: Core(CUDNN, _RUNS + "run_cudnn", _cudnn),
    },
)
