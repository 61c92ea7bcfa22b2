"""Converts parameters and Adafactor's moments between checkpoint layouts.

A parameter is a dict of parts: its "value", and Adafactor's momentum "m" and second moments. The
latter are either "v", with the parameter's shape, or "over 0" and "over 1", each averaged over one
of the two axes. In the common form, layers are unstacked and have the names of an unscanned model:
"encoder/layers_0/mlp/wo/kernel".

Scanned models stack all layers in one array along axis 1: "encoder/encoder/mlp/wo/kernel". Models
with `position` "relative_per_layer" have a table of relative positions per layer, other models one
per stack.

Source: google-research/t5x, `adafactor.py`.
"""

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from tasks.terminal.command_line import UserError
from trainer.checkpoints.stored import Checkpoint
from trainer.checkpoints.tensors import Tensor, divided, held, mean, stacked
from trainer.model.layers import LAYERS_AXIS

Parts = dict[str, Tensor]
# The axes over which v_row and v_col are averaged; None if moments are not factored.
FactoredOver = tuple[int, int] | None

POSITIONS = "relpos_bias/rel_embedding"
_SCANNED = re.compile(r"(encoder|decoder)/\1/(.+)")
LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/(.+)")
# Leaves of our optimizer's state: POSITION_IN_OPTAX_CHAIN/MOMENT/PARAMETER.
_OUR_MOMENT = re.compile(r"\d+/(v_row|v_col|v|ema)/(.+)")
# Shape of the placeholder for a moment that a parameter lacks.
_UNUSED = (1,)


def read_parts(checkpoint: Checkpoint) -> dict[str, Parts]:
    """Returns a checkpoint's parameters and moments by name, layers unstacked."""
    if checkpoint.parts is not None:
        return checkpoint.parts
    kept: dict[str, Parts] = {}
    for name, tensor in checkpoint.state.items():
        if moment := _OUR_MOMENT.fullmatch(name):
            kept.setdefault(moment[2], {})[{"ema": "m"}.get(moment[1], moment[1])] = tensor
    return unstacked(checkpoint.parameters, kept)


def unstacked(
    parameters: Mapping[str, Tensor],
    kept: Mapping[str, Parts],
    stacked_factors: Callable[[str], FactoredOver] | None = None,
) -> dict[str, Parts]:
    """Returns parameters and moments by name, unstacked; `kept` has "m", "v", "v_row" and "v_col".

    `stacked_factors` tells how moments of stacked layers are factored, if not by size.
    """
    found: dict[str, Parts] = {}
    for name, value in parameters.items():
        scanned = _SCANNED.fullmatch(name)
        if scanned and stacked_factors:
            factors = stacked_factors(name)
        else:
            factors = by_size(own_shape(name, value.shape))
        parts = {"value": value}
        for kind, tensor in kept.get(name, {}).items():
            if tensor.shape == _UNUSED:
                continue
            if kind in ("v_row", "v_col"):
                if factors is None:
                    continue
                kind = f"over {factors[kind == 'v_col']}"
            parts[kind] = tensor
        if not scanned:
            found[name] = parts
            continue
        divisions = {part: divided(tensor, _axis(part)) for part, tensor in parts.items()}
        for number in range(value.shape[LAYERS_AXIS]):
            found[f"{scanned[1]}/layers_{number}/{scanned[2]}"] = {
                part: division[number] for part, division in divisions.items()
            }
    return found


def with_shared_positions(path: str, parameters: Mapping[str, Parts]) -> dict[str, Parts]:
    """Merges equal per-layer tables of relative positions into one per stack."""
    out = dict(parameters)
    for name, parts in parameters.items():
        found = LAYER.fullmatch(name)
        if not found or found[3] != POSITIONS:
            continue
        del out[name]
        shared = out.setdefault(f"{found[1]}/{POSITIONS}", parts)
        if not np.array_equal(shared["value"].whole(), parts["value"].whole()):
            raise UserError(
                f"{path}: layers 0 and {found[2]} of the {found[1]} have different tables of "
                f"relative positions ({found[1]}/{found[1]}/{POSITIONS}), like T5X's "
                "scalable_t5: set --model.position=relative_per_layer"
            )
    return out


def have_positions_per_layer(names: Iterable[str]) -> bool:
    """Returns whether parameters with these names have relative positions per layer."""
    return any(LAYER.fullmatch(name) and name.endswith(POSITIONS) for name in names)


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


def stack(parameters: Mapping[str, Parts]) -> dict[str, Parts]:
    """Stacks layers as in our scanned models."""
    out: dict[str, Parts] = {}
    layers: dict[str, dict[int, Parts]] = {}
    for name, parts in parameters.items():
        layer = LAYER.fullmatch(name)
        if not layer:
            out[name] = parts
            continue
        layers.setdefault(f"{layer[1]}/{layer[1]}/{layer[3]}", {})[int(layer[2])] = parts
    for name, by_number in layers.items():
        of_layers = [by_number[number] for number in range(len(by_number))]
        out[name] = {
            part: stacked([parts[part] for parts in of_layers], _axis(part))
            for part in of_layers[0]
        }
    return out


def moments(parts: Parts, factors: FactoredOver) -> dict[str, Tensor]:
    """Returns moments under the names "m", "v", "v_row" and "v_col"; float32 [1] if missing."""
    rows, columns = factors or (None, None)
    places = {"m": "m", "v": "v", "v_row": f"over {rows}", "v_col": f"over {columns}"}
    unused = held(np.zeros(_UNUSED, np.float32))
    return {kind: parts.get(part, unused) for kind, part in places.items()}


def by_size(shape: tuple[int, ...], min_dim_size: int = 0) -> FactoredOver:
    """Returns Adafactor's factoring of a matrix; v_row averages over the larger (or later) axis."""
    if len(shape) != 2 or min(shape) < min_dim_size:
        return None
    return (0, 1) if shape[0] > shape[1] else (1, 0)


def is_stacked(name: str) -> bool:
    """Returns whether a parameter with this name stacks all layers in one array."""
    return bool(_SCANNED.fullmatch(name))


def own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of one layer's tensor."""
    return shape[:LAYERS_AXIS] + shape[LAYERS_AXIS + 1 :] if is_stacked(name) else shape


def _axis(part: str) -> int:
    return 0 if part == "over 0" else LAYERS_AXIS
