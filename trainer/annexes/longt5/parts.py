"""Transient-global attention: a window, and the sums of all blocks of the row. No JAX.

Source: LongT5 (arXiv:2112.07916), section 3.1.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.terminal.flag_fields import at_least, field
from trainer.model.device import AUTO
from trainer.model.slot import Part, require_of


@dataclass(frozen=True)
class TransientGlobal:
    """Options of transient-global attention."""

    window: int = field(
        255,
        "number of keys that a query sees beside the blocks: those up to half as far away on "
        "either side",
        rule=at_least(1),
    )
    block: int = field(16, "number of tokens in a block", rule=at_least(1))


def _check(config: Any, options: TransientGlobal) -> None:
    part = f"with attention_window {config.part('attention_window').name!r}"
    rule = f"above 0 {part}, which is the encoder's"
    require_of(config, config.num_encoder_layers > 0, "num_encoder_layers", rule)
    # Biases of blocks are relative, and other parts expect as many keys as positions.
    for slot, name in (("mixer", "attention"), ("position", "relative")):
        require_of(config, config.part(slot).name == name, slot, f"{name!r} {part}")
    rule = f"'attention' {part}"
    require_of(config, config.cross_attention == "attention", "cross_attention", rule)
    reads = any(facts.reads_weights for facts in config.stack_facts.values())
    require_of(config, not reads, "stack_parts", f"without parts that read weights {part}")
    fits = config.attention in (AUTO, "einsum")
    require_of(config, fits, "attention", f"{AUTO!r} or 'einsum' {part}")


TRANSIENT_GLOBAL = Part(
    "trainer.annexes.longt5.transient_global:transient_global",
    options=TransientGlobal,
    check=_check,
)
