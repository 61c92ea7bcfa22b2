"""Parts of t5-experiments: memory tokens, and attention with conditional queries (cdQ). No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.terminal.fields import above, field
from trainer.model.capabilities import ENCODER_DECODER, MixerFacts, StackPartFacts
from trainer.model.slots import Part, require_of


@dataclass(frozen=True)
class ConditionalQueries:
    """Options of attention with conditional queries (cdQ)."""

    conditional_heads: int | None = field(
        None,
        "number of heads whose queries are conditional: half of num_heads, or all; None means all",
        rule=above(0),
    )


def _check_conditional(config: Any, options: ConditionalQueries) -> None:
    heads = options.conditional_heads or config.num_heads
    rule = f"one whose conditional_heads are num_heads, {config.num_heads}, or half of them"
    require_of(config, config.num_heads in (heads, 2 * heads), "mixer", rule)


def _check_memory(config: Any, count: int) -> None:
    fits = config.architecture == ENCODER_DECODER
    require_of(config, fits, "memory_tokens", "0 in a model without both stacks")


CDQ = Part(
    "trainer.annexes.t5_experiments.layers:mixer",
    MixerFacts(decodes=False),
    ConditionalQueries,
    _check_conditional,
)
MEMORY_TOKENS = Part(
    "trainer.annexes.t5_experiments.layers:memory_tokens",
    StackPartFacts(lengthens=True),
    check=_check_memory,
)
