"""The states between layers, and the order in which a layer's sublayers run.

Dimensions: B batch, L length of a stack's rows, M remaining positions, D model, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.norms import Function, NormPlacement
from trainer.model.positions import Positions


class Flow(NamedTuple):
    """The states between two layers; `index_BL` holds the remaining positions, None if all."""

    x_BLD: Array
    index_BL: Array | None = None

    def keep(self, index_BM: Array) -> Flow:
        kept_BM = index_BM if self.index_BL is None else take(self.index_BL, index_BM)
        return Flow(take(self.x_BLD, index_BM), kept_BM)


def take(x_BLD: Array, index_BM: Array) -> Array:
    """Returns positions `index_BM` of [B, L, ...]; B is 1 if all rows are alike."""
    x_BLD = jnp.broadcast_to(x_BLD, (len(index_BM), *x_BLD.shape[1:]))
    return jax.vmap(lambda x_LD, index_M: x_LD[index_M])(x_BLD, index_BM)


def take_rows(rows: Rows, index_BM: Array) -> Rows:
    """Returns facts about the remaining positions, which keep their position numbers."""
    position_BL = rows.position_BL
    if position_BL is None:
        position_BL = jnp.arange(rows.segment_BL.shape[1])[None]
    whole = rows._replace(position_BL=position_BL)
    return jax.tree.map(lambda each_BL: take(each_BL, index_BM), whole)


def take_view(view: View, index_BM: Array) -> View:
    """Returns the remaining positions' view of one another."""
    length = view.rows.segment_BL.shape[1]
    mask_BLL = jnp.broadcast_to(view.mask_BLS, (len(view.mask_BLS), length, length))
    mask_BMM = jax.vmap(_both)(
        jnp.broadcast_to(mask_BLL, (len(index_BM), length, length)), index_BM
    )
    left = take_rows(view.rows, index_BM)
    positions = _take_positions(view.positions, index_BM)
    return View(mask_BMM, positions, left, left, watched=view.watched)


def _take_positions(positions: Positions, index_BM: Array) -> Positions:
    bias_BHMM, angle_BMC = None, None
    if positions.bias_HLS is not None:
        bias_HLS = positions.bias_HLS
        bias_BHMM = jax.vmap(lambda index_M: _both(bias_HLS, index_M))(index_BM)
    if positions.angle_BLC is not None:
        angle_BMC = take(positions.angle_BLC, index_BM)
    return Positions(angle_BLC=angle_BMC, bias_BHLS=bias_BHMM, amplitude=positions.amplitude)


def _both(x_LL: Array, index_M: Array) -> Array:
    return x_LL[..., index_M[:, None], index_M[None, :]]


class Sublayer(NamedTuple):
    """A sublayer of a layer.

    `norm_name` lacks the placement's prefix. `run` maps (y_BLD, rows=rows) to [B, L, D]; `kept`,
    called next, maps rows to the indices [B, M] that later sublayers keep; None means all.
    """

    norm_name: str
    placement: NormPlacement
    run: Callable[..., Array]
    kept: Callable[[Rows], Array | None] = lambda rows: None


# Makes the norm of a sublayer.
Norms = Callable[[Sublayer], Function]
# The arrangement slot: runs the sublayers of a layer, with dropout on their outputs.
Arrangement = Callable[[Flow, Rows, Sequence[Sublayer], Norms, Function], Flow]


def sequential(
    flow: Flow, rows: Rows, sublayers: Sequence[Sublayer], norm: Norms, dropout: Function
) -> Flow:
    """Lets each sublayer read the previous sublayer's output, as in the first Transformer."""
    for sublayer in sublayers:
        run = partial(sublayer.run, rows=rows)
        flow = flow._replace(
            x_BLD=sublayer.placement.branch(flow.x_BLD, norm(sublayer), run, dropout)
        )
        if (kept_BM := sublayer.kept(rows)) is not None:
            flow, rows = flow.keep(kept_BM), take_rows(rows, kept_BM)
    return flow


def parallel(
    flow: Flow, rows: Rows, sublayers: Sequence[Sublayer], norm: Norms, dropout: Function
) -> Flow:
    """Adds all outputs to the states, which each sublayer reads through its own norm (GPT-NeoX)."""
    x_BLD = flow.x_BLD
    outputs = [dropout(sublayer.run(norm(sublayer)(x_BLD), rows=rows)) for sublayer in sublayers]
    return flow._replace(x_BLD=sum(outputs, start=x_BLD))


def parallel_with_one_norm(
    flow: Flow, rows: Rows, sublayers: Sequence[Sublayer], norm: Norms, dropout: Function
) -> Flow:
    """Works like `parallel`, with one norm for all sublayers (GPT-J, PaLM)."""
    y_BLD = norm(sublayers[0])(flow.x_BLD)
    outputs = [dropout(sublayer.run(y_BLD, rows=rows)) for sublayer in sublayers]
    return flow._replace(x_BLD=sum(outputs, start=flow.x_BLD))
