"""One layer of a stack, with T5X's parameter names.

Dimensions: B batch, L query length, S key length, D model, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from flax import linen as nn
from jax import Array

from trainer.model.arrangements import Flow, Sublayer, take_view
from trainer.model.cache import positions_at
from trainer.model.dense import Shared
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.norms import Function
from trainer.model.positions import Position
from trainer.model.spec import LayerSpec

# Name of the sublayer that attends to the encoder.
CROSS_ATTENTION = "encoder_decoder_attention"


class Surroundings(NamedTuple):
    """The inputs of a layer besides its states.

    `source` is the cross mixer's input, `view` the view of all the stack's positions, `cross_view`
    their view of the encoder; `sources` holds what the stack's parts provide, by name.
    """

    source: Any
    view: View
    cross_view: View | None
    sources: Mapping[str, Any]


class Layer(nn.Module):
    """One layer: mixer, then the spec's cross mixer, the sublayers of parts, and feed-forward.

    `role` is "encoder" or "decoder" and affects only names. `position` is None if a stack's layers
    share a scheme.
    """

    spec: LayerSpec
    shared: Shared
    role: str
    position: Position | None

    @nn.compact
    def __call__(
        self, flow: Flow, surroundings: Surroundings, deterministic: bool
    ) -> tuple[Flow, Any]:
        """Returns the states and what the layer leaves for a decoder."""
        spec, shared = self.spec, self.shared
        view = self._view(flow, surroundings)
        assert view.watched is not None

        def norm(sublayer: Sublayer) -> Function:
            name = f"{sublayer.placement.prefix}_{sublayer.norm_name}"
            return spec.norm.build(shared, name)

        def dropout(y_BLD: Array) -> Array:
            return shared.dropout()(y_BLD, deterministic)

        def ended(sublayer: Sublayer) -> Sublayer:
            if sublayer.placement.output is None:
                return sublayer
            last = spec.norm.build(shared, f"{sublayer.placement.output}_{sublayer.norm_name}")
            return sublayer._replace(run=lambda *args, **named: last(sublayer.run(*args, **named)))

        sublayers = [ended(each) for each in self._sublayers(view, surroundings, deterministic)]
        flow = spec.arrangement(flow, view.rows, sublayers, norm, dropout)
        left = (hook.left(flow.x_BLD, view.watched) for hook in spec.hooks)
        return flow, next((each for each in left if each is not None), None)

    def _view(self, flow: Flow, surroundings: Surroundings) -> View:
        spec, view = self.spec, surroundings.view
        if self.position is not None:
            own = self.position.build(self.shared, spec.mixer.num_heads or 1, self.position.name)
            view = view._replace(positions=positions_at(own, view.cache, view.rows))
        if flow.index_BL is not None:
            view = take_view(view, flow.index_BL)
        for hook in spec.hooks:
            view = hook.view(view, surroundings.cross_view)
        watched = dict.fromkeys(name for hook in spec.hooks for name in hook.watches)
        return view._replace(watched=watched)

    def _sublayers(
        self, view: View, surroundings: Surroundings, deterministic: bool
    ) -> list[Sublayer]:
        spec, shared = self.spec, self.shared
        first, last = spec.placements.sublayers, spec.placements.feed_forward
        # T5X's name; the norm's name also begins with the placement's prefix ("pre" in T5X).
        mixer_name = "attention" if self.role == "encoder" else "self_attention"
        mixer = spec.mixer.build(shared, mixer_name)
        source, watched = surroundings.source, view.watched or {}

        def mix(y_BLD: Array, rows: Rows) -> Array:
            looked_at = y_BLD
            for hook in spec.hooks:
                looked_at = hook.looked_at(looked_at, source, view)
            return mixer(y_BLD, looked_at, view, deterministic)

        def kept(rows: Rows) -> Array | None:
            each = (hook.kept(watched, rows) for hook in spec.hooks)
            return next((index_BM for index_BM in each if index_BM is not None), None)

        placement = spec.placements.mixer or first
        sublayers = [Sublayer(f"{mixer_name}_layer_norm", placement, mix, kept)]
        if spec.cross_mixer is not None:
            cross, seen = spec.cross_mixer.build(shared, CROSS_ATTENTION), surroundings.cross_view

            def look(y_BLD: Array, rows: Rows) -> Array:
                return cross(y_BLD, source, seen, deterministic)

            sublayers.append(Sublayer("cross_attention_layer_norm", first, look))
        for hook in spec.hooks:
            own = hook.sublayer(shared, first, surroundings.sources, deterministic)
            sublayers += [own] if own else []
        feed_forward = spec.feed_forward.build(shared, "mlp")
        if feed_forward is not None:
            kept_states = {} if spec.feed_forward.pointwise else {"cache": view.cache}
            run = partial(feed_forward, deterministic=deterministic, **kept_states)
            sublayers.append(Sublayer("mlp_layer_norm", last or first, run))
        return sublayers
