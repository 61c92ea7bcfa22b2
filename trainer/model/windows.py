"""Layers that see only a window of their row, alternating with layers that see all of it. No JAX.

Source: Mistral 7B (arXiv:2310.06825), section 2; Gemma 2 (arXiv:2408.00118), section 2; Gemma 3
(arXiv:2503.19786), section 2, for rotary positions of local layers with a base of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tasks.terminal.flag_fields import Rule, above, at_least, field
from trainer.model.slot import reject_changed, require_of

LOCAL, GLOBAL = "l", "g"


def _are_letters(layers: str) -> bool:
    return {LOCAL} <= {*layers} <= {LOCAL, GLOBAL}


@dataclass(frozen=True)
class Sliding:
    """Options of windows."""

    window: int = field(
        4096,
        "number of keys that a query of a local layer sees, with its own; in a bidirectional stack "
        "these are the keys up to half as far away on either side",
        rule=at_least(1),
    )
    layers: str = field(
        LOCAL,
        "a letter for each layer, repeated as often as needed: l for a local one, g for a global "
        "one",
        rule=Rule("letters l and g, with at least one l", _are_letters),
    )
    base: float | None = field(
        None,
        "base of the rotary positions in local layers, which are then not scaled; None: the same "
        "positions in all layers",
        rule=above(1),
    )
    reach: int | None = field(
        None,
        "how far a query of a bidirectional stack sees on either side, in tokens; None: window / 2",
        rule=at_least(0),
    )
    ahead: int | None = field(
        None,
        "how far a query of a bidirectional stack sees ahead, in tokens, as in T5Gemma 2; None: as "
        "far as behind",
        rule=at_least(0),
    )
    decoder: bool = field(
        True, "a decoder beside an encoder has local layers, too; false: it sees all"
    )

    def __post_init__(self) -> None:
        if not self.decoder:
            reject_changed(self, "with decoder=false, where window says the same", "reach", "ahead")


def check(config: Any, options: Sliding) -> None:
    fits = options.base is None or config.position_scheme == "rotary"
    require_of(config, fits, "attention_window", "without base where positions are not rotary")
    fits = config.num_encoder_layers > 0 or (options.reach, options.ahead) == (None, None)
    rule = "without reach and ahead where no stack is bidirectional"
    require_of(config, fits, "attention_window", rule)
    fits = options.decoder or config.has_both_stacks
    rule = "without decoder=false in a model with one stack"
    require_of(config, fits, "attention_window", rule)


def slide(config: Any, options: Sliding, stack: Any) -> Any:
    """Returns a stack whose local layers see a window."""
    if stack.mask.causal and not options.decoder:
        return stack
    mask = stack.mask._replace(window=options.window)
    if not mask.causal:
        reach = options.window // 2 if options.reach is None else options.reach
        mask = mask._replace(window=1 + reach, ahead=options.ahead)
    local: dict[str, Any] = {"mask": mask}
    if options.base is not None:
        local["position"] = replace(stack.position, base=options.base, scaling=None)
    letters = options.layers * len(stack.layers)
    layers = tuple(
        replace(layer, **local) if letter == LOCAL else layer
        for layer, letter in zip(stack.layers, letters, strict=False)
    )
    return replace(stack, layers=layers)
