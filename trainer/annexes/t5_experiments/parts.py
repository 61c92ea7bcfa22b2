"""Parts of t5-experiments: memory tokens, and attention with conditional queries (cdQ). No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.terminal.flag_fields import above, field
from trainer.model.part_facts import MixerFacts, StackPartFacts
from trainer.model.slot import Choice, Part, add_part, require_of


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


@dataclass(frozen=True)
class MemoryTokens:
    """Options of memory tokens."""

    count: int = field(
        10,
        "number of learned vectors before the encoder's input, visible to all its tokens and to "
        "the decoder; needs a family with both stacks, and no packing",
        rule=above(0),
    )


def _check_memory(config: Any, options: MemoryTokens) -> None:
    fits = config.has_both_stacks
    rule = "without memory_tokens in a model without both stacks"
    require_of(config, fits, "stack_parts", rule)


CDQ = Part(
    "trainer.annexes.t5_experiments.layers:mixer",
    MixerFacts(decodes=False),
    ConditionalQueries,
    _check_conditional,
)
MEMORY_TOKENS = Part(
    "trainer.annexes.t5_experiments.layers:memory_tokens",
    StackPartFacts(lengthens=lambda options: options.count),
    MemoryTokens,
    _check_memory,
)


def moved(model: dict[str, Any], count: int) -> None:
    """Moves the field of runs before 0.3 into the part's options."""
    if count:
        add_part(model, Choice("memory_tokens", MemoryTokens(count)))
