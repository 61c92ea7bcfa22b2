"""Checks a `ModelConfig` beyond what its parts check themselves. No JAX."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from typing import Any

from tasks.terminal.flag_fields import Rejected, one_of
from trainer.model.attention_cores import CORES, EINSUM
from trainer.model.device import AUTO
from trainer.model.registry import (
    ACTIVATION_NAMES,
    FULL_PATTERN,
    MIXERS,
    POSITIONS,
    SLOTS,
    STACK_PARTS,
    ZERO_NAMES,
)
from trainer.model.slot import require_of

# Fields that can be set in any family; the other fields change its parts.
_OF_ALL = (
    *("family", "vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "mlp_activations"),
    *(
        "num_encoder_layers",
        "num_decoder_layers",
        "start_id",
        "dropout_rate",
        "dtype",
        "tied_logits",
    ),
    *("position", "max_positions", "upstream_compat", "scan_layers", "remat"),
    *("attention", "softmax_dtype", "start_id"),
)
# Sizes in which the stacks of a model may differ.
SIZES = ("emb_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
_SIZE = re.compile(rf"({'|'.join(SIZES)})=([1-9]\d*)")


def check(config: Any) -> None:
    """Checks the values of a `ModelConfig`, alone and in combination; raises `Rejected`."""
    _check_sizes(config)
    _check_changes(config)
    _check_encoder_sizes(config)
    _check_layers(config)
    _check_heads(config)
    _check_logits(config)
    _check_position(config)
    _check_sublayers(config)
    for slot, known in SLOTS.items():
        name, options = config.part(slot)
        known[name].check(config, options)
    for name, choice in config.stack_choices.items():
        STACK_PARTS[name].check(config, choice.options)
    _check_pattern(config)
    _check_attention(config)
    _check_scan(config)


def _check_sizes(config: Any) -> None:
    for name in ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "max_positions"):
        require_of(config, getattr(config, name) > 0, name, "above 0")
    for name in config.family_facts.even:
        require_of(config, getattr(config, name) % 2 == 0, name, "even")
    for name, has_stack in (
        ("num_encoder_layers", config.has_encoder),
        ("num_decoder_layers", config.has_decoder),
    ):
        layers = getattr(config, name)
        if has_stack:
            require_of(config, layers > 0, name, "above 0")
        else:
            rule = f"0 in a model that is {config.architecture}-only"
            require_of(config, layers == 0, name, rule)
    if config.start_id is not None:
        fits = 0 <= config.start_id < config.vocab_size
        require_of(config, fits, "start_id", f"from 0 to {config.vocab_size - 1}")
    require_of(config, 0.0 <= config.dropout_rate < 1.0, "dropout_rate", "in [0, 1)")
    if config.mlp_activations is not None:
        known = {*config.mlp_activations} <= {*ACTIVATION_NAMES}
        rule = f"one or more, each {one_of(ACTIVATION_NAMES)}"
        require_of(config, len(config.mlp_activations) > 0 and known, "mlp_activations", rule)


def _check_changes(config: Any) -> None:
    """Checks that all parts exist, and that no family is changed unless it is changeable."""
    for field in fields(config):
        if field.name in _OF_ALL or config.family_facts.changeable or field.default is MISSING:
            continue
        rule = f"{field.default} in family {config.family}"
        require_of(config, getattr(config, field.name) == field.default, field.name, rule)
    for slot in SLOTS:
        config.part(slot)


def _check_encoder_sizes(config: Any) -> None:
    if not config.encoder_sizes:
        return
    found = [_SIZE.fullmatch(text) for text in config.encoder_sizes]
    names = [each[1] for each in found if each]
    rule = f"sizes such as emb_dim=512, of {', '.join(SIZES)}, each once"
    fits = all(found) and len({*names}) == len(names)
    require_of(config, fits, "encoder_sizes", rule)
    rule = "values other than the decoder's"
    fits = all(str(getattr(config, each[1])) != each[2] for each in found if each)
    require_of(config, fits, "encoder_sizes", rule)
    fits = config.cross_attention == "attention" and not config.shared_embedding
    rule = "left out unless cross_attention is 'attention' and shared_embedding is false"
    require_of(config, fits, "encoder_sizes", rule)
    _ = config.of_encoder  # checks itself


def _check_layers(config: Any) -> None:
    fits = config.facts("norm_placement").parallel or config.parallel_blocks == "none"
    rule = f"'none' with norm_placement {config.value('norm_placement')!r}"
    require_of(config, fits, "parallel_blocks", rule)
    if config.upstream_compat:
        mixer = config.mixer_facts
        fits = config.family_facts.convolves or mixer.convolves or mixer.counts_positions
        rule = "False where nothing convolves or synthesizes"
        require_of(config, fits, "upstream_compat", rule)


def _check_heads(config: Any) -> None:
    facts, mixer = config.mixer_facts, config.part("mixer").name
    fits = facts.decodes or config.has_encoder
    require_of(config, fits, "mixer", "one that can be causal in a model without an encoder")
    for name, changed, fits in (
        ("num_kv_heads", config.num_kv_heads is not None, facts.groups),
        ("query_key_norm", config.query_key_norm, facts.queries),
        ("attention_softcap", config.attention_softcap is not None, facts.queries),
        ("attention_window", config.part("attention_window").name != "none", facts.selects),
        ("attention_scale", config.attention_scale is not None, facts.queries),
        ("zero_init", "query" in config.zero_init, facts.queries),
    ):
        require_of(config, not changed or fits, name, f"unset with mixer {mixer!r}")
    fits = config.attention_out_bias is None or facts.queries
    require_of(config, fits, "attention_out_bias", f"unset with mixer {mixer!r}")
    fits = config.shared_embedding or config.has_both_stacks
    require_of(config, fits, "shared_embedding", "True in a model without both stacks")
    fits = config.shared_embedding or not config.lengthening
    require_of(config, fits, "shared_embedding", "True with a part that lengthens rows")
    fits = config.logits_softcap is None or config.has_decoder
    require_of(config, fits, "logits_softcap", "unset in an encoder-only model")
    require_of(config, config.token_types >= 0, "token_types", "0 or more")
    for name, default in (("token_types", 2), ("head_bias", True)):
        fits = getattr(config, name) == default or not config.has_decoder
        require_of(config, fits, name, f"{default} in a model with a decoder")
    fits = config.query_key_norm or config.query_key_norm_over == "head"
    require_of(config, fits, "query_key_norm_over", "'head' without query_key_norm")
    if config.num_kv_heads is not None:
        fits = config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads == 0
        rule = f"a divisor of num_heads, which is {config.num_heads}"
        require_of(config, fits, "num_kv_heads", rule)


def _check_logits(config: Any) -> None:
    for name in ("attention_scale", "attention_softcap", "logits_scale", "logits_softcap"):
        if (value := getattr(config, name)) is not None:
            require_of(config, 0 < value < math.inf, name, "a finite number above 0")
    zeros = {*config.zero_init}
    fits = zeros <= {*ZERO_NAMES} and len(zeros) == len(config.zero_init)
    require_of(config, fits, "zero_init", f"some of {', '.join(ZERO_NAMES)}, each once")
    fits = "logits" not in zeros or not config.value("tied_logits")
    require_of(config, fits, "zero_init", "without logits, which are tied")


def _check_position(config: Any) -> None:
    scheme, family, mixer = config.position_scheme, config.family_facts, config.mixer_facts
    fitting = POSITIONS if family.positions is None else family.positions
    rule = f"{one_of(fitting)} in family {config.family}"
    require_of(config, scheme in fitting, "position", rule)
    read = fitting if mixer.positions is None else mixer.positions

    def both(name: str) -> bool:
        return name in read and (mixer.rotates or not POSITIONS[name].facts.rotates)

    if not both(scheme):
        rule = f"{one_of(filter(both, fitting))} with mixer {config.mixer!r}"
        raise Rejected("position", config.position, rule)


def _check_sublayers(config: Any) -> None:
    name, reads = config.part("feed_forward").name, config.facts("feed_forward").reads
    for field in ("mlp_activations", "mlp_bias"):
        # The head of an encoder-only model has an activation, too.
        if field in reads or (field == "mlp_activations" and not config.has_decoder):
            continue
        # Naming the family's own value, as `explicit` does, is not a change.
        own = getattr(config.family_facts, field)
        rule = f"None with feed_forward {name!r}"
        require_of(config, getattr(config, field) in (None, own), field, rule)
    fits = config.has_both_stacks or config.cross_attention == "attention"
    require_of(config, fits, "cross_attention", f"'attention' in family {config.family}")


def _check_pattern(config: Any) -> None:
    if config.part("attention_pattern").name == FULL_PATTERN:
        return
    rule = f"'full' with mixer {config.part('mixer').name!r}"
    require_of(config, config.mixer_facts.sparse, "attention_pattern", rule)
    reading = any(facts.reads_weights for facts in config.stack_facts.values())
    for other in (
        *["attention_weights"] * (config.attention_weights != "softmax"),
        *["attention_softcap"] * (config.attention_softcap is not None),
        *["attention_window"] * (config.part("attention_window").name != "none"),
        *["cross_attention"] * config.facts("cross_attention").merges,
        *["stack_parts"] * reading,
    ):
        rule = f"'full' with {other} {getattr(config, other)!r}"
        require_of(config, False, "attention_pattern", rule)


def _check_attention(config: Any) -> None:
    name = config.attention
    if name in (AUTO, EINSUM):
        return
    if not config.mixer_facts.cores:
        fitting = [mixer for mixer, part in MIXERS.items() if part.facts.cores]
        raise Rejected("mixer", config.mixer, f"{one_of(fitting)} with attention {name!r}")
    if reason := CORES[name].supports(config.attention_request()):
        rule = f"{reason.rule} with attention {name!r}"
        rule += f", {reason.because}" if reason.because else ""
        raise Rejected(reason.field, getattr(config, reason.field), rule)


def _check_scan(config: Any) -> None:
    alike = config.family_facts.layers is None and all(
        facts.alike for facts in config.stack_facts.values()
    )
    alike = alike and config.facts("norm_placement").alike
    rule = "False where layers differ, because a scan runs equal layers"
    require_of(config, alike or not config.scan_layers, "scan_layers", rule)
