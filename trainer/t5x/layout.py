"""Converts parameters and Adafactor's moments between checkpoint layouts.

A parameter is a dict of parts: its "value", and Adafactor's momentum "m" and second moments. The
latter are either "v", with the parameter's shape, or "over 0" and "over 1", each averaged over one
of the two axes. In the common form, layers are unstacked and have the names of an unscanned model:
"encoder/layers_0/mlp/wo/kernel".

Scanned models stack all layers in one array along axis 1: "encoder/encoder/mlp/wo/kernel". T5X's
`scalable_t5` also has separate axes for heads and channels, [embed, layers, heads, kv], and a table
of relative positions per layer, like our models with `position` "relative_per_layer"; other models
have one table per stack.

Source: google-research/t5x, `examples/scalable_t5` and `adafactor.py`.
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from tasks.terminal.command_line import UserError
from trainer.model.layers import LAYERS_AXIS
from trainer.t5x.read import Checkpoint
from trainer.t5x.tensors import Tensor, divided, held, mean, reshaped, stacked

Parts = dict[str, Tensor]
# The axes over which v_row and v_col are averaged; None if moments are not factored.
FactoredOver = tuple[int, int] | None

_POSITIONS = "relpos_bias/rel_embedding"
_SCANNED = re.compile(r"(encoder|decoder)/\1/(.+)")
_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/(.+)")
_HAS_HEADS = re.compile(r".*attention/(query|key|value|out)/kernel")
# Kernels whose last axis is "embed" (T5X's rows); in other kernels, "embed" is the first axis.
_ENDS_WITH_EMBED = re.compile(r".*(out|wo)/kernel")
# Leaves of our optimizer's state: POSITION_IN_OPTAX_CHAIN/MOMENT/PARAMETER.
_OUR_MOMENT = re.compile(r"\d+/(v_row|v_col|v|ema)/(.+)")
# Shape of T5X's placeholder for a moment that a parameter lacks.
_UNUSED = (1,)
# T5X's default for `min_dim_size_to_factor`.
MIN_DIM_SIZE = 128


def read_parts(checkpoint: Checkpoint) -> dict[str, Parts]:
    """Returns a checkpoint's parameters and moments by name, layers unstacked."""
    kept = checkpoint.moments
    if checkpoint.run is not None:
        kept = {}
        for name, tensor in checkpoint.state.items():
            if moment := _OUR_MOMENT.fullmatch(name):
                kept.setdefault(moment[2], {})[{"ema": "m"}.get(moment[1], moment[1])] = tensor
    found: dict[str, Parts] = {}
    for name, value in checkpoint.parameters.items():
        moments = {
            kind: tensor for kind, tensor in kept.get(name, {}).items() if tensor.shape != _UNUSED
        }
        scanned = _SCANNED.fullmatch(name)
        scanned_by_t5x = scanned and checkpoint.run is None
        factors = by_name(name) if scanned_by_t5x else by_size(own_shape(name, value.shape))
        parts = {"value": value}
        for kind, tensor in moments.items():
            if kind in ("v_row", "v_col"):
                if factors is None:
                    continue
                kind = f"over {factors[kind == 'v_col']}"
            parts[kind] = tensor
        if not scanned:
            found[name] = parts
            continue
        divisions = {
            part: [_without_heads(name, part, layer) for layer in divided(tensor, _axis(part))]
            for part, tensor in parts.items()
        }
        for number in range(value.shape[LAYERS_AXIS]):
            found[f"{scanned[1]}/layers_{number}/{scanned[2]}"] = {
                part: division[number] for part, division in divisions.items()
            }
    return found


def with_shared_positions(path: str, parameters: Mapping[str, Parts]) -> dict[str, Parts]:
    """Merges equal per-layer tables of relative positions into one per stack."""
    out = dict(parameters)
    for name, parts in parameters.items():
        found = _LAYER.fullmatch(name)
        if not found or found[3] != _POSITIONS:
            continue
        del out[name]
        shared = out.setdefault(f"{found[1]}/{_POSITIONS}", parts)
        if not np.array_equal(shared["value"].whole(), parts["value"].whole()):
            raise UserError(
                f"{path}: layers 0 and {found[2]} of the {found[1]} have different tables of "
                f"relative positions ({found[1]}/{found[1]}/{_POSITIONS}), like T5X's "
                "scalable_t5: set --model.position=relative_per_layer"
            )
    return out


def have_positions_per_layer(names: Iterable[str]) -> bool:
    """Returns whether parameters with these names have relative positions per layer."""
    return any(_LAYER.fullmatch(name) and name.endswith(_POSITIONS) for name in names)


def adafactor_parts(
    name: str, parts: Parts, factors: FactoredOver, momentum: bool
) -> tuple[Parts, str | None]:
    """Returns a parameter's value with exactly the moments that the given Adafactor needs.

    Returns (parts, None), or (incomplete parts, a message) if a moment is missing or superfluous.
    """
    wanted = ["v"] if factors is None else [f"over {axis}" for axis in sorted(factors)]
    out = {"value": parts["value"]}
    for part in [*wanted, "m"] if momentum else wanted:
        tensor = parts.get(part)
        if tensor is None and part.startswith("over") and "v" in parts:
            # Exact, since averaging over an axis commutes with the moving average.
            tensor = mean(parts["v"], int(part[-1]))
        if tensor is None:
            kind = "not factored" if part == "v" else "factored"
            missing = f"momentum of {name}" if part == "m" else f"second moments of {name} ({kind})"
            return out, f"it has no {missing}"
        out[part] = tensor
    if "m" in parts and not momentum:
        return out, f"it has momentum of {name}, but --optimizer.beta1 is not set"
    return out, None


def stack(parameters: Mapping[str, Parts], num_heads: int | None = None) -> dict[str, Parts]:
    """Stacks layers as in our scanned models or, if `num_heads` is given, as in T5X's."""
    out: dict[str, Parts] = {}
    layers: dict[str, dict[int, Parts]] = {}
    if num_heads:
        parameters = _with_positions_in_layers(parameters)
    for name, parts in parameters.items():
        layer = _LAYER.fullmatch(name)
        if not layer:
            out[name] = parts
            continue
        if num_heads:
            parts = {
                part: _with_heads(name, part, tensor, num_heads) for part, tensor in parts.items()
            }
        layers.setdefault(f"{layer[1]}/{layer[1]}/{layer[3]}", {})[int(layer[2])] = parts
    for name, by_number in layers.items():
        of_layers = [by_number[number] for number in range(len(by_number))]
        out[name] = {
            part: stacked([parts[part] for parts in of_layers], _axis(part))
            for part in of_layers[0]
        }
    return out


def moments(parts: Parts, factors: FactoredOver) -> dict[str, Tensor]:
    """Returns moments under T5X's names "m", "v", "v_row" and "v_col"; float32 [1] if missing."""
    rows, columns = factors or (None, None)
    places = {"m": "m", "v": "v", "v_row": f"over {rows}", "v_col": f"over {columns}"}
    unused = held(np.zeros(_UNUSED, np.float32))
    return {kind: parts.get(part, unused) for kind, part in places.items()}


def by_size(shape: tuple[int, ...], min_dim_size: int = 0) -> FactoredOver:
    """Returns Adafactor's factoring of a matrix; v_row averages over the larger (or later) axis."""
    if len(shape) != 2 or min(shape) < min_dim_size:
        return None
    return (0, 1) if shape[0] > shape[1] else (1, 0)


def by_name(name: str) -> FactoredOver:
    """Returns T5X's factoring in `scalable_t5`: by the "embed" axis for kernels of any size."""
    if not name.endswith("/kernel"):
        return None
    return (0, 1) if _ENDS_WITH_EMBED.fullmatch(name) else (1, 0)


def t5x_factors(
    name: str, shape: tuple[int, ...], min_dim_size: int, scanned: bool
) -> FactoredOver:
    """Returns T5X's factoring of a parameter in an unscanned or scanned model."""
    in_layers = is_stacked(name) or _LAYER.fullmatch(name) or name.endswith(_POSITIONS)
    return by_name(name) if scanned and in_layers else by_size(shape, min_dim_size)


def is_stacked(name: str) -> bool:
    """Returns whether a parameter with this name stacks all layers in one array."""
    return bool(_SCANNED.fullmatch(name))


def own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of one layer's tensor."""
    return shape[:LAYERS_AXIS] + shape[LAYERS_AXIS + 1 :] if is_stacked(name) else shape


def _axis(part: str) -> int:
    return 0 if part == "over 0" else LAYERS_AXIS


def _without_heads(name: str, part: str, tensor: Tensor) -> Tensor:
    """Merges the [heads, kv] axes of one layer's part, which T5X keeps separate."""
    if not _HAS_HEADS.fullmatch(name):
        return tensor
    shape = tensor.shape
    if part.startswith("over"):
        return reshaped(tensor, (shape[0] * shape[1],)) if len(shape) == 2 else tensor
    if len(shape) < 3:
        return tensor
    first = shape[0] * shape[1] if _ENDS_WITH_EMBED.fullmatch(name) else shape[0]
    return reshaped(tensor, (first, int(np.prod(shape)) // first))


def _with_heads(name: str, part: str, tensor: Tensor, num_heads: int) -> Tensor:
    """Splits the merged [heads, kv] axis; the inverse of `_without_heads`."""
    if not _HAS_HEADS.fullmatch(name):
        return tensor
    heads_axis = 0 if _ENDS_WITH_EMBED.fullmatch(name) else 1
    if part == f"over {heads_axis}":
        return tensor
    place = 0 if part.startswith("over") else heads_axis
    shape = tensor.shape
    split = (num_heads, shape[place] // num_heads)
    return reshaped(tensor, (*shape[:place], *split, *shape[place + 1 :]))


def _with_positions_in_layers(parameters: Mapping[str, Parts]) -> dict[str, Parts]:
    out = dict(parameters)
    for name in parameters:
        found = _LAYER.fullmatch(name)
        shared = found and parameters.get(f"{found[1]}/{_POSITIONS}")
        if found and shared:
            out[f"{found[1]}/layers_{found[2]}/{_POSITIONS}"] = shared
            out.pop(f"{found[1]}/{_POSITIONS}", None)
    return out
