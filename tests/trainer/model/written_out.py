"""A decoder of one row, written out in float64 NumPy from the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tree = dict[str, Any]


def _norm(x: np.ndarray, params: Tree, kind: str, epsilon: float, gain: str) -> np.ndarray:
    if kind == "dynamic_tanh":
        return params["scale"] * np.tanh(params["alpha"] * x) + params["bias"]
    if kind == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    scale = params.get("scale", np.ones(1))
    x = x * (1 + scale if gain == "offset" else scale)
    return x + params.get("bias", 0.0)


def _turned(x_LHK: np.ndarray, channels: int, frequency: np.ndarray) -> np.ndarray:
    """Returns heads with channel i and i + channels / 2 as the parts of a complex number turned."""
    half = channels // 2
    number = x_LHK[..., :half] + 1j * x_LHK[..., half:channels]
    number = number * np.exp(1j * np.arange(len(x_LHK))[:, None, None] * frequency)
    return np.concatenate([number.real, number.imag, x_LHK[..., channels:]], -1)


def llama3_frequencies(
    channels: int, base: float, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Returns Llama 3.1's angles by the wavelengths of its code, one pair after the other."""
    found = []
    for pair in range(channels // 2):
        frequency = base ** (-2 * pair / channels)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            found.append(frequency)
        elif wavelength > original / low:
            found.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(found)


def yarn_frequencies(
    channels: int, base: float, factor: float, fast: float, slow: float, original: int
) -> np.ndarray:
    """Returns YaRN's angles by the ramp over turns' logarithms, one pair after the other."""

    def pair_of(turns: float) -> float:
        # The pair whose wave of 2 pi base^(2 i / channels) positions fits in `turns` times.
        return channels / 2 * math.log(original / (2 * math.pi * turns), base)

    first, last = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), channels - 1)
    found = []
    for pair in range(channels // 2):
        slowed = min(max((pair - first) / (last - first), 0), 1)
        found.append(base ** (-2 * pair / channels) * (1 - slowed + slowed / factor))
    return np.array(found)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu": _gelu,
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def weights(name: str, logits_HLS: np.ndarray, mask_LS: np.ndarray) -> np.ndarray:
    """Returns the weights of attention, one query after the other."""
    out = np.zeros_like(logits_HLS)
    for head, query in np.ndindex(logits_HLS.shape[:2]):
        seen = mask_LS[query]
        x = logits_HLS[head, query, seen]
        if name == "softmax":
            value = np.exp(x - x.max())
            value /= value.sum()
        else:
            kind = name.removeprefix("norm_")
            value = np.maximum(x, 0) ** 2 if kind == "squared_relu" else np.where(
                x > 0, x + 1, np.exp(np.minimum(x, 0))
            )  # fmt: skip
            value = value / (value.sum() + 1e-6 if name.startswith("norm_") else seen.sum())
        out[head, query, seen] = value
    return out


class Decoder:
    """A decoder with the parts that `options` name; defaults are those of family "lm".

    Options: kv_heads, query_key_norm, scale, weights, norm (kind, epsilon, gain), position
    ("none", "alibi", "rotary", "sinusoidal"), frequency (radians per position of each pair),
    parallel, embedding_norm, embedding_scale, activations, logits_scale; placement of norms,
    joined_norm, cap and logits_cap; of each layer, windows (or None) and frequencies.
    """

    def __init__(self, params: Tree, heads: int, head_dim: int, **options: Any):
        self.params = _float64(params)["decoder"]
        self.heads, self.head_dim, self.options = heads, head_dim, options

    def norm(self, x: np.ndarray, params: Tree) -> np.ndarray:
        return _norm(x, params, *self.options.get("norm", ("rms_norm", 1e-6, "vector")))

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Returns logits [L, V]."""
        options, params = self.options, self.params
        table = params["token_embedder"]["embedding"]
        x = table[tokens] * options.get("embedding_scale", 1.0)
        length, width = x.shape
        if options.get("position") == "sinusoidal":
            for place in range(length):
                for channel in range(width):
                    angle = place / 10_000 ** ((channel - channel % 2) / width)
                    x[place, channel] += math.cos(angle) if channel % 2 else math.sin(angle)
        if options.get("embedding_norm"):
            x = self.norm(x, params["embedding_layer_norm"])
        for index in range(sum(name.startswith("layers_") for name in params)):
            x = self.layer(x, params[f"layers_{index}"], index)
        x = self.norm(x, params.get("decoder_norm", {}))
        kernel = params["logits_dense"]["kernel"] if "logits_dense" in params else table.T
        return _capped(x @ kernel * options.get("logits_scale", 1.0), options.get("logits_cap"))

    def layer(self, x: np.ndarray, params: Tree, index: int) -> np.ndarray:
        placement = self.options.get("placement", "pre")
        if placement != "pre":
            for name in ("self_attention", "mlp"):
                y = x
                if placement == "sandwich":
                    y = self.norm(x, params[f"pre_{name}_layer_norm"])
                if name == "mlp":
                    y = self.mlp(y, params[name])
                else:
                    y = self.attention(y, params[name], index)
                x = x + self.norm(y, params[f"post_{name}_layer_norm"])
            return x
        first = self.norm(x, params.get("pre_self_attention_layer_norm", {}))
        attended = self.attention(first, params["self_attention"], index)
        parallel = self.options.get("parallel", "none")
        if parallel == "one_norm":
            return x + attended + self.mlp(first, params["mlp"])
        second = x + attended if parallel == "none" else x
        second = self.norm(second, params.get("pre_mlp_layer_norm", {}))
        return x + attended + self.mlp(second, params["mlp"])

    def attention(self, x: np.ndarray, params: Tree, index: int) -> np.ndarray:
        options, length = self.options, len(x)
        q, k, v = (_dense(x, params[name]) for name in ("query", "key", "value"))
        if options.get("joined_norm"):
            q, k = self.norm(q, params["query_norm"]), self.norm(k, params["key_norm"])
        q, k, v = (each.reshape(length, -1, self.head_dim) for each in (q, k, v))
        if options.get("query_key_norm"):
            q, k = self.norm(q, params["query_norm"]), self.norm(k, params["key_norm"])
        if options.get("position") == "rotary":
            frequency = options["frequencies" if "frequencies" in options else "frequency"]
            frequency = frequency[index] if "frequencies" in options else frequency
            q, k = (_turned(each, 2 * len(frequency), frequency) for each in (q, k))
            for each in (q, k):
                each[..., : 2 * len(frequency)] *= options.get("amplitude", 1.0)
        group = self.heads // k.shape[1]
        logits = np.zeros((self.heads, length, length))
        scale = options.get("scale", 1.0)
        for head in range(self.heads):
            logits[head] = q[:, head] @ k[:, head // group].T * scale
            if options.get("position") == "alibi":
                slope = 2 ** (-8 * (head + 1) / self.heads)
                distance = np.arange(length)[:, None] - np.arange(length)
                logits[head] -= slope * np.abs(distance)
        logits = _capped(logits, options.get("cap"))
        mask = np.tril(np.ones((length, length), bool))
        if (window := options.get("windows", {}).get(index)) is not None:
            for query, key in np.ndindex(mask.shape):
                mask[query, key] &= query - window < key
        mixed = weights(options.get("weights", "softmax"), logits, mask)
        heads = [mixed[head] @ v[:, head // group] for head in range(self.heads)]
        return _dense(np.concatenate(heads, -1), params["out"])

    def mlp(self, x: np.ndarray, params: Tree) -> np.ndarray:
        names = self.options.get("activations", ("gelu", "linear"))
        kernels = ["wi"] if len(names) == 1 else [f"wi_{index}" for index in range(len(names))]
        hidden = np.ones(1)
        for name, kernel in zip(names, kernels, strict=True):
            hidden = hidden * ACTIVATIONS[name](_dense(x, params[kernel]))
        return _dense(hidden, params["wo"])


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _dense(x: np.ndarray, params: Tree) -> np.ndarray:
    return x @ params["kernel"] + params.get("bias", 0.0)


def _float64(tree: Tree) -> Tree:
    return {
        name: _float64(node) if isinstance(node, dict) else np.asarray(node, np.float64)
        for name, node in tree.items()
    }
