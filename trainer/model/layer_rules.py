"""Rules of the fields of `ModelConfig` that say of which sublayers a layer is made. No JAX."""

from __future__ import annotations

from typing import Any

from tasks.terminal.fields import one_of, require
from trainer.model.facts import AUTO, BY_LAYER, CROSS_ATTENTIONS, ENCODER, ENCODER_DECODER, MIXERS


def check_layers(config: Any) -> None:
    """Checks a `ModelConfig`.

    Raises:
      Rejected: a field makes no sense or has no effect beside the others.
    """
    _check_feed_forward(config)
    _check_cross_attention(config)
    _check_heads(config)
    _check_dropping(config)
    _check_database(config)


def require_of(config: Any, holds: bool, name: str, rule: str) -> None:
    """Raises `Rejected` with the value of a field unless `holds`."""
    require(holds, name, getattr(config, name), rule)


def _require_selecting_mixer(config: Any, field: str) -> None:
    fitting = [name for name, facts in MIXERS.items() if facts.selects]
    rule = f"{one_of(fitting)} with {field}"
    require(config.mixer_facts.selects, "mixer", config.value("mixer"), rule)


def _check_feed_forward(config: Any) -> None:
    part = config.part("feed_forward")
    if part.name == "mlp":
        return
    # The head of an encoder-only model has an activation, too.
    unread: dict[str, Any] = {"mlp_activations": None} if config.architecture != ENCODER else {}
    unread |= {"num_experts": 0} | ({"mlp_bias": None} if part.name == "none" else {})
    for name, unset in unread.items():
        # Naming the family's own value, as `explicit` does, changes nothing.
        own = getattr(config.family_facts, name, unset)
        rule = f"{unset} with feed_forward {part.name!r}"
        require_of(config, getattr(config, name) in (unset, own), name, rule)
    if part.name == "none":
        rule = "'none' with feed_forward 'none'"
        require_of(config, config.parallel_blocks == "none", "parallel_blocks", rule)
    elif part.options.sigmoid_dropout:
        rule = "above 0 with sigmoid_dropout"
        require_of(config, config.dropout_rate > 0, "dropout_rate", rule)


def _check_cross_attention(config: Any) -> None:
    name = config.cross_attention
    require_of(config, name in CROSS_ATTENTIONS, "cross_attention", one_of(CROSS_ATTENTIONS))
    if name == "attention":
        return
    fits = config.architecture == ENCODER_DECODER
    require_of(config, fits, "cross_attention", f"'attention' in family {config.family}")
    if name in BY_LAYER:
        rule = f"num_encoder_layers, {config.num_encoder_layers}, with cross_attention {name!r}"
        fits = config.num_decoder_layers == config.num_encoder_layers
        require_of(config, fits, "num_decoder_layers", rule)
        rule = f"False with cross_attention {name!r}: each layer looks at other states"
        require_of(config, not config.scan_layers, "scan_layers", rule)
    if name != "layerwise":
        _require_selecting_mixer(config, f"cross_attention {name!r}")
    if name == "merged":
        part = config.part("position")
        fits = part.name != "rotary" or part.options.cross
        rule = "with cross=true if rotary with cross_attention 'merged'"
        require_of(config, fits, "position", rule)
        rule = "another one with cross_attention 'merged', whose mask kernels do not know"
        require_of(config, config.attention != "pallas", "attention", rule)
        rule = "'none' with cross_attention 'merged'"
        require_of(config, config.parallel_blocks == "none", "parallel_blocks", rule)


def _check_heads(config: Any) -> None:
    part = config.part("head_scaling")
    group = getattr(config.part("mixer").options, "group", 1)
    rule = f"a multiple of {group}, the group of mixer 'summed_heads'"
    require_of(config, config.num_heads % group == 0, "num_heads", rule)
    if part.name == "none":
        return
    options, field = part.options, "head_scaling"
    require_of(config, config.num_kv_heads is None, "num_kv_heads", f"None with {field}")
    for share in (options.first, options.second):
        heads = config.num_heads * share
        rule = f"such that num_heads, {config.num_heads}, times {share:g} is a multiple of {group}"
        require_of(config, heads % group == 0, field, rule)
        width = config.num_heads * config.head_dim
        rule = f"such that num_heads * head_dim, {width}, divides by {heads:g} heads"
        require_of(config, not options.constant or width % heads == 0, field, rule)
    # Angles, and the scale by which ALiBi is divided, belong to one width of heads.
    fits = not options.constant or config.position_scheme not in ("rotary", "alibi")
    require_of(config, fits, "position", "without rotary and alibi where widths of heads differ")
    _require_selecting_mixer(config, field)


def _check_database(config: Any) -> None:
    require_of(config, config.database_entries >= 0, "database_entries", "0 or more")
    if config.database_entries:
        scaling = config.part("head_scaling")
        fits = scaling.name == "none" or not scaling.options.constant
        require_of(config, fits, "head_scaling", "without constant=true with database_entries")


def _check_dropping(config: Any) -> None:
    require_of(config, config.token_dropping >= 0, "token_dropping", "0 or more")
    if not config.token_dropping:
        return
    fits = config.architecture == ENCODER_DECODER
    require_of(
        config, fits, "token_dropping", f"0 in family {config.family}, which predicts in place"
    )
    rule = "False with token_dropping: layers have rows of different lengths"
    require_of(config, not config.scan_layers, "scan_layers", rule)
    rule = "'auto' or 'einsum' with token_dropping, which reads the weights"
    require_of(config, config.attention in (AUTO, "einsum"), "attention", rule)
    rule = "'attention' or 'merged' with token_dropping"
    require_of(config, config.cross_attention not in BY_LAYER, "cross_attention", rule)
    require_of(
        config, config.parallel_blocks == "none", "parallel_blocks", "'none' with token_dropping"
    )
    _require_selecting_mixer(config, "token_dropping")
