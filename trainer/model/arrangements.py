"""How the sublayers of a layer follow one another.

Dimensions: B batch, L length, M kept positions, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax

from trainer.model.flow import Flow, take_rows
from trainer.model.masks import Rows
from trainer.model.norms import Function, NormPlacement


def _keeps_all(rows: Rows) -> None:
    return None


class Sublayer(NamedTuple):
    """A sublayer of a layer.

    `norm_name` lacks the placement's prefix. `run` maps (y_BLD, rows=rows) to [B, L, D]. After it,
    `kept` maps rows to the indices [B, M] that later sublayers keep; None means all.
    """

    norm_name: str
    placement: NormPlacement
    run: Callable[..., jax.Array]
    kept: Callable[[Rows], jax.Array | None] = _keeps_all


# Makes the norm of a sublayer.
Norms = Callable[[Sublayer], Function]
# The arrangement slot: runs the sublayers of a layer, with dropout on their outputs.
Arrangement = Callable[[Flow, Rows, Sequence[Sublayer], Norms, Function], Flow]


def sequential(
    flow: Flow, rows: Rows, sublayers: Sequence[Sublayer], norm: Norms, dropout: Function
) -> Flow:
    """Lets each sublayer read the previous one's output, as in the first Transformer."""
    for each in sublayers:
        run = partial(each.run, rows=rows)
        flow = flow._replace(x_BLD=each.placement.branch(flow.x_BLD, norm(each), run, dropout))
        if (kept_BM := each.kept(rows)) is not None:
            flow, rows = flow.keep(kept_BM), take_rows(rows, kept_BM)
    return flow


def parallel(
    flow: Flow, rows: Rows, sublayers: Sequence[Sublayer], norm: Norms, dropout: Function
) -> Flow:
    """Adds the outputs of all sublayers to the states that they read, each by its own norm.

    As in GPT-NeoX.
    """
    x_BLD = flow.x_BLD
    outputs = [dropout(each.run(norm(each)(x_BLD), rows=rows)) for each in sublayers]
    return flow._replace(x_BLD=sum(outputs, start=x_BLD))


def parallel_with_one_norm(
    flow: Flow, rows: Rows, sublayers: Sequence[Sublayer], norm: Norms, dropout: Function
) -> Flow:
    """Like `parallel`, with one norm for all (GPT-J, PaLM)."""
    y_BLD = norm(sublayers[0])(flow.x_BLD)
    outputs = [dropout(each.run(y_BLD, rows=rows)) for each in sublayers]
    return flow._replace(x_BLD=sum(outputs, start=flow.x_BLD))
