"""A stack of layers, with T5X's parameter names.

Dimensions: B batch, L query length, S key length, D model, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from flax import linen as nn
from jax import Array

from trainer.model.arrangements import Flow, take, take_rows
from trainer.model.cache import Cache, positions_at
from trainer.model.dense import Shared, rows_divided
from trainer.model.embedding import TokenEmbedder
from trainer.model.layer import Layer, Surroundings
from trainer.model.layers import rematerialised, scan
from trainer.model.masks import AnyMask, Rows, known, seen_from
from trainer.model.mixers import View
from trainer.model.norms import Function
from trainer.model.positions import Position, Positions
from trainer.model.spec import LayerSpec, StackSpec


class Memory(NamedTuple):
    """An encoder's normalised last states and, if the decoder reads them, what its layers leave."""

    states_BSD: Array
    rows: Rows
    layers: tuple[Any, ...] = ()


class Sight(NamedTuple):
    """The facts that decide a layer's view: number of heads, and its own mask and position."""

    num_heads: int
    mask: AnyMask | None = None
    position: Position | None = None


def sight(layer: LayerSpec) -> Sight:
    """Returns what decides the view of a layer."""
    return Sight(layer.mixer.num_heads or 1, layer.mask, layer.position)


def _period(sights: list[Sight]) -> list[Sight]:
    """Returns the shortest list that gives all of them if it is repeated."""
    sizes = range(1, len(sights))
    repeats = (n for n in sizes if sights == (sights[:n] * len(sights))[: len(sights)])
    return sights[: next(repeats, len(sights))]


class Stack(nn.Module):
    """Maps tokens to a `Memory`, or to logits if the spec has a logits slot."""

    spec: StackSpec
    shared: Shared
    role: str  # "encoder" or "decoder": affects only names

    @nn.compact
    def __call__(
        self,
        tokens_BL: Array,
        rows: Rows,
        embedder: TokenEmbedder | None,
        memory: Memory | None,
        deterministic: bool,
        embedded_BLD: Array | None = None,
        cache: Cache | None = None,
        last_B: Array | None = None,
    ) -> Any:
        """Returns the states, all positions' logits, or with `last_B` one position's per row.

        With `cache`, the rows hold the prompt or the next token; see `Cache`.
        """
        spec, shared = self.spec, self.shared
        if embedder is None:  # a model with one stack keeps the table inside that stack
            embedder = TokenEmbedder(shared, name="token_embedder")
        views = self._views(rows, cache)
        first = next(iter(views.values()))
        cross_view = self._cross_view(first, memory)
        x_BLD = embedder(tokens_BL) if embedded_BLD is None else embedded_BLD
        x_BLD = self._first_states(x_BLD, first.positions, rows, deterministic)
        sources = {
            part.name: part.source.build(shared, part.name)(len(tokens_BL))
            for part in spec.parts
            if part.source is not None
        }

        def run(layer: Layer, flow: Flow, source: Any = None, at: Sight | None = None) -> Any:
            if source is None and memory is not None:
                source = memory.states_BSD
            view = views[at or sight(layer.spec)]
            around = Surroundings(source, view, cross_view, sources)
            flow, left = layer(flow, around, deterministic)
            return flow._replace(x_BLD=rows_divided(flow.x_BLD)), left

        flow, left = self._run_layers(run, Flow(x_BLD), memory)
        if last_B is not None:
            flow = Flow(take(flow.x_BLD, last_B[:, None]))
        y_BLD, last_norm = self._last_states(flow, deterministic)
        if spec.logits is not None:
            return spec.logits(y_BLD, embedder, shared)
        if flow.index_BL is not None:
            rows = take_rows(rows, flow.index_BL)
        for layer in spec.layers[:1]:
            for hook in layer.hooks:
                left = [hook.finished(each, last_norm) for each in left]
        return Memory(y_BLD, rows, tuple(left))

    def _views(self, rows: Rows, cache: Cache | None) -> dict[Sight, View]:
        """Returns the views of all layers; first the stack's own, with the most heads."""
        spec = self.spec
        most = max((layer.mixer.num_heads for layer in spec.layers), default=0) or 1
        sights = dict.fromkeys([Sight(most), *map(sight, spec.layers)])
        next_only = cache is not None and not cache.filling
        source_rows = cache.source_rows() if cache is not None and next_only else rows
        views: dict[Sight, View] = {}
        for each in sorted(sights, key=lambda each: -each.num_heads):
            mask = spec.mask if each.mask is None else each.mask
            if cache is not None and cache.seen_BS is not None:
                mask_BLS = seen_from(mask, cache.slot, cache.seen_BS)
            else:
                mask_BLS = mask(rows, rows)
            positions = self._positions(each, most, views, rows, cache)
            views[each] = View(mask_BLS, positions, rows, source_rows, known(mask), cache=cache)
        return views

    def _positions(
        self, at: Sight, most: int, views: Mapping[Sight, View], rows: Rows, cache: Cache | None
    ) -> Positions:
        """Returns the positions of a sight, from an earlier one if they are the same."""
        scheme = self.spec.position if at.position is None else at.position
        if scheme.per_layer:
            return Positions()
        name, alike = scheme.name, [view for view in views if view.position == at.position]
        # Each number of heads needs its own bias table.
        for each in alike:
            found = views[each].positions
            if each.num_heads == at.num_heads or found.bias_HLS is None:
                return found
        if at.num_heads != most:
            name = f"{name}_{at.num_heads}"
        if at.position is not None:
            name = f"{name}_{len(views)}"
        return positions_at(scheme.build(self.shared, at.num_heads, name), cache, rows)

    def _cross_view(self, own: View, memory: Memory | None) -> View | None:
        """Returns the view of the encoder, or None if layers do not attend to it."""
        spec = self.spec
        if spec.cross_mask is None or memory is None:
            return None
        mask_BLS, angles = spec.cross_mask(own.rows, memory.rows), Positions()
        if spec.position.cross:
            heads = max(layer.mixer.num_heads for layer in spec.layers)
            scheme = spec.position.build(self.shared, heads, f"{spec.position.name}_of_memory")
            sources = memory.rows.segment_BL.shape[1]
            source_angle = scheme(sources, sources, memory.rows.position_BL).angle_BLC
            angles = Positions(
                angle_BLC=own.positions.angle_BLC,
                source_angle_BSC=source_angle,
                amplitude=own.positions.amplitude,
            )
        cache = None if own.cache is None else own.cache._replace(fixed=True)
        mask = known(spec.cross_mask)
        return View(mask_BLS, angles, own.rows, memory.rows, mask, cache=cache)

    def _first_states(
        self, x_BLD: Array, positions: Positions, rows: Rows, deterministic: bool
    ) -> Array:
        if positions.embedding_BLD is not None:
            x_BLD += positions.embedding_BLD
        x_BLD = self.spec.embedding(x_BLD, rows, self.shared)
        return rows_divided(self.shared.dropout()(x_BLD, deterministic))

    def _run_layers(self, run: Any, flow: Flow, memory: Memory | None) -> tuple[Flow, list[Any]]:
        spec, shared = self.spec, self.shared
        position = spec.position if spec.position.per_layer else None
        if shared.scan_layers:
            period = _period([*map(sight, spec.layers)])
            runs = [rematerialised(partial(run, at=at), shared.remat, True) for at in period]
            if len({replace(each, mask=None, position=None) for each in spec.layers}) > 1:
                raise ValueError(f"the layers of the {self.role} differ: a scan cannot run them")
            layer = Layer(spec.layers[0], shared, self.role, position, name=self.role)

            def run_at(layer: Layer, flow: Flow, place: int) -> tuple[Flow, Any]:
                return runs[place](layer, flow)

            return scan(run_at, layer, flow, len(spec.layers), len(period)), []
        run = rematerialised(run, shared.remat, False)
        left = []
        for index, layer_spec in enumerate(spec.layers):
            name = f"layers_{index}"
            layer = Layer(layer_spec, shared, self.role, position, name=name)
            source = [memory.layers[index]] if memory is not None and memory.layers else []
            flow, each = run(layer, flow, *source)
            left += [] if each is None else [each]
        return flow, left

    def _last_states(self, flow: Flow, deterministic: bool) -> tuple[Array, Function]:
        spec, shared = self.spec, self.shared
        last_norm = spec.norm.build(shared, f"{self.role}_norm")
        y_BLD = last_norm(flow.x_BLD)
        # T5X draws per element for an encoder's output, but per row before logits.
        dropout = shared.dropout(broadcast_length=spec.logits is not None)
        return dropout(y_BLD, deterministic or not spec.output_dropout), last_norm
