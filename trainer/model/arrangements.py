"""How the sublayers of a layer follow one another.

Dimensions: B batch, L length, M kept positions, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax

from trainer.model.flow import Flow, take_rows
from trainer.model.masks import Rows
from trainer.model.norms import NormPlacement
from trainer.model.norms import Sublayer as Function


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


class Arrangement(Protocol):
    """The arrangement slot: runs the sublayers of a layer, with dropout on their outputs."""

    def __call__(
        self,
        flow: Flow,
        rows: Rows,
        sublayers: Sequence[Sublayer],
        norm: Callable[[Sublayer], Function],
        dropout: Function,
    ) -> Flow: ...


@dataclass(frozen=True)
class Sequential:
    """Each sublayer reads the previous one's output, as in the first Transformer."""

    def __call__(
        self,
        flow: Flow,
        rows: Rows,
        sublayers: Sequence[Sublayer],
        norm: Callable[[Sublayer], Function],
        dropout: Function,
    ) -> Flow:
        for each in sublayers:
            run = partial(each.run, rows=rows)
            flow = flow._replace(x_BLD=each.placement(flow.x_BLD, norm(each), run, dropout))
            if (kept_BM := each.kept(rows)) is not None:
                flow, rows = flow.keep(kept_BM), take_rows(rows, kept_BM)
        return flow


@dataclass(frozen=True)
class Parallel:
    """All sublayers read the same states, and their outputs are added to these.

    With `one_norm` they share a norm (GPT-J, PaLM); otherwise each has its own (GPT-NeoX).
    """

    one_norm: bool = False

    def __call__(
        self,
        flow: Flow,
        rows: Rows,
        sublayers: Sequence[Sublayer],
        norm: Callable[[Sublayer], Function],
        dropout: Function,
    ) -> Flow:
        x_BLD = flow.x_BLD
        shared_BLD = norm(sublayers[0])(x_BLD) if self.one_norm else None
        outputs = [
            dropout(each.run(norm(each)(x_BLD) if shared_BLD is None else shared_BLD, rows=rows))
            for each in sublayers
        ]
        return flow._replace(x_BLD=sum(outputs, start=x_BLD))


def sequential(config: Any, options: Any) -> Arrangement:
    """Returns sequential sublayers."""
    return Sequential()


def parallel(config: Any, options: Any) -> Arrangement:
    """Returns parallel sublayers, each with its own norm."""
    return Parallel()


def parallel_with_one_norm(config: Any, options: Any) -> Arrangement:
    """Returns parallel sublayers with one norm."""
    return Parallel(one_norm=True)
