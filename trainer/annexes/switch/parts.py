"""Switch layers as a feed-forward part, and the fields that chose them before. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.terminal.flag_fields import above, field
from trainer.model.part_facts import FeedForwardFacts
from trainer.model.slot import Choice, Part, require_of


@dataclass(frozen=True)
class Experts:
    """Options of layers with experts."""

    experts: int = field(8, "number of experts in each Switch layer", rule=above(0))
    every: int = field(
        4, "make every layer whose number is a multiple of this a Switch layer", rule=above(0)
    )
    capacity: int | None = field(
        None,
        "number of tokens of a row that an expert takes, as in transformers; None: 1.25 times its "
        "share of a group of up to 1,024 tokens, or 2 times in evaluation",
        rule=above(0),
    )


def _check(config: Any, options: Experts) -> None:
    rule = "one without experts in an encoder-only model, whose losses do not route"
    require_of(config, config.has_decoder, "feed_forward", rule)
    rule = "False where layers differ, because a scan runs equal layers"
    require_of(config, options.every == 1 or not config.scan_layers, "scan_layers", rule)
    own = (None, config.family_facts.mlp_bias)
    rule = f"{own[1]} where all layers have experts, whose projections have no bias"
    require_of(config, options.every > 1 or config.mlp_bias in own, "mlp_bias", rule)


def _idle(config: Any, options: Experts) -> str | None:
    if options.every <= max(config.num_encoder_layers, config.num_decoder_layers):
        return None
    return f"where no stack has {options.every} layers, so none has experts"


SWITCH = Part(
    "trainer.annexes.switch.layers:switch",
    FeedForwardFacts(
        ("mlp_activations", "mlp_bias"),
        couples="tokens are routed to experts within a part of the batch",
        idle=_idle,
    ),
    Experts,
    _check,
)


def moved(model: dict[str, Any], experts: int) -> None:
    """Moves the fields of runs before 0.3 into the part's options."""
    every, capacity = model.pop("switch_every", 4), model.pop("expert_capacity", None)
    if experts:
        model["feed_forward"] = str(Choice("switch", Experts(experts, every, capacity)))
