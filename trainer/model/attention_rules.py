"""Rules of the fields of `ModelConfig` about attention and positions. No JAX."""

from __future__ import annotations

import math
from typing import Any

from tasks.terminal.fields import one_of
from trainer.model import options
from trainer.model.facts import (
    AUTO,
    DECODER,
    ENCODER_DECODER,
    FULL_PATTERN,
    MIXERS,
    ZERO_NAMES,
    fills_lanes,
    fills_tiles,
)
from trainer.model.layer_rules import require_of


def check_heads(config: Any) -> None:
    """Checks the fields of heads, scales and initial zeros of a `ModelConfig`.

    Raises:
      Rejected: a field makes no sense or has no effect beside the others.
    """
    facts, mixer = config.mixer_facts, config.part("mixer").name
    fits = facts.decodes or config.architecture != DECODER
    require_of(config, fits, "mixer", "one that can be causal in a model without an encoder")
    if isinstance(chosen := config.part("mixer").options, options.ConditionalQueries):
        heads = chosen.conditional_heads or config.num_heads
        rule = f"one whose conditional_heads are num_heads, {config.num_heads}, or half of them"
        require_of(config, config.num_heads in (heads, 2 * heads), "mixer", rule)
    for name, changed, fits in (
        ("num_kv_heads", config.num_kv_heads is not None, facts.groups),
        ("query_key_norm", config.query_key_norm, facts.queries),
        ("attention_scale", config.attention_scale is not None, facts.queries),
        ("zero_init", "query" in config.zero_init, facts.queries),
    ):
        require_of(config, not changed or fits, name, f"unset with mixer {mixer!r}")
    if config.num_kv_heads is not None:
        fits = config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads == 0
        rule = f"a divisor of num_heads, which is {config.num_heads}"
        require_of(config, fits, "num_kv_heads", rule)
    if config.attention_scale is not None:
        fits = 0 < config.attention_scale < math.inf
        require_of(config, fits, "attention_scale", "a finite number above 0")
    if config.logits_scale is not None:
        fits = 0 < config.logits_scale < math.inf
        require_of(config, fits, "logits_scale", "a finite number above 0")
    fits = {*config.zero_init} <= {*ZERO_NAMES} and len({*config.zero_init}) == len(
        config.zero_init
    )
    require_of(config, fits, "zero_init", f"some of {', '.join(ZERO_NAMES)}, each once")
    tied = config.value("tied_logits")
    require_of(
        config,
        "logits" not in config.zero_init or not tied,
        "zero_init",
        "without logits, which are tied",
    )
    start = config.part("parametrisation")
    zero = start.name == "mup" and start.options.readout == "zero"
    require_of(config, not (zero and tied), "parametrisation", "another readout: logits are tied")


def check_position(config: Any) -> None:
    """Checks the position scheme of a `ModelConfig`; raises `Rejected`."""
    facts, scheme = config.family_facts, config.position_scheme
    rule = f"{one_of(facts.positions)} in family {config.family}"
    require_of(config, scheme in facts.positions, "position", rule)
    fitting = [name for name in facts.positions if name in config.mixer_facts.positions]
    rule = f"{one_of(fitting)} with mixer {config.mixer!r}"
    require_of(config, scheme in fitting, "position", rule)
    if scheme == "rotary":
        channels = config.rotated_channels
        rule = f"such that rotary positions rotate whole pairs of channels, not {channels:g}"
        require_of(config, channels > 0 and channels % 2 == 0, "head_dim", rule)
        cross = config.part("position").options.cross
        rule = "without cross=true in a model without cross-attention"
        require_of(config, not cross or config.architecture == ENCODER_DECODER, "position", rule)


def _check_pattern(config: Any) -> None:
    name, pattern = config.part("attention_pattern")
    if name == FULL_PATTERN:
        return
    rule = f"'full' with mixer {config.part('mixer').name!r}"
    require_of(config, config.mixer_facts.sparse, "attention_pattern", rule)
    rule = f"'full' with attention {config.attention!r}, which computes all blocks"
    fits = config.attention in (AUTO, "einsum", "pallas")
    require_of(config, fits, "attention_pattern", rule)
    for other, plain in (
        ("attention_weights", "softmax"),
        ("cross_attention", ("attention", "encoder_keys", "layerwise")),
        ("token_dropping", 0),
    ):
        value = getattr(config, other)
        fits = value in plain if isinstance(plain, tuple) else value == plain
        require_of(config, fits, "attention_pattern", f"'full' with {other} {value!r}")
    fits = config.attention != "pallas" or fills_tiles(pattern.block)
    rule = "of blocks of 8, 16, 32, 64 or a multiple of 128 with attention 'pallas'"
    require_of(config, fits, "attention_pattern", rule)


def check_attention(config: Any) -> None:
    """Checks that the pattern and the implementation of attention fit a `ModelConfig`.

    Raises:
      Rejected: they do not fit the other fields.
    """
    _check_pattern(config)
    if config.attention in (AUTO, "einsum"):
        return
    # Weights dropped for all queries at once are values dropped, which kernels need not know.
    if config.attention != "pallas" or config.drops_by_query:
        rule = f"0 with attention {config.attention!r}, which drops no weights"
        require_of(config, config.dropout_rate == 0, "dropout_rate", rule)
    fitting = [name for name, facts in MIXERS.items() if config.attention in facts.attentions]
    rule = f"{one_of(fitting)} with attention {config.attention!r}"
    require_of(config, config.attention in config.mixer_facts.attentions, "mixer", rule)
    rule = f"'softmax' with attention {config.attention!r}"
    require_of(config, config.attention_weights == "softmax", "attention_weights", rule)
    rule = f"another one with attention {config.attention!r}"
    require_of(config, config.attention in config.attentions, "position", rule)
    if config.attention == "pallas":
        rule = "a divisor or multiple of 128 with attention 'pallas'"
        require_of(config, fills_lanes(config.head_dim), "head_dim", rule)
    if config.attention == "cudnn":
        require_of(config, config.dtype == "bfloat16", "dtype", "'bfloat16' with attention 'cudnn'")
