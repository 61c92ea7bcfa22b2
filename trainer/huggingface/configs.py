"""Finds the transformers model that equals one of ours, or the reason why there is none."""

import contextlib
import dataclasses
from typing import Any

from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS, SpecialIds
from trainer.huggingface.config_json import from_config
from trainer.huggingface.folding import folded
from trainer.huggingface.formats import CUSTOM
from trainer.huggingface.kinds import KINDS, candidates
from trainer.huggingface.names import logits_are_tied
from trainer.model.config import ModelConfig
from trainer.model.spec import EncoderSpec, ModelSpec, model_spec


def has_custom_code(family: str) -> bool:
    """Returns whether modeling_palimpsest.py supports a family."""
    return CUSTOM in candidates(family)


def refusal(config: ModelConfig, custom_code: bool = False) -> str | None:
    """Returns why transformers lacks an equal model, or None if it has one."""
    if has_custom_code(config.family) and not custom_code and refusal(config, True) is None:
        if model_type(config) != CUSTOM:
            return None
        return (
            f"family {config.family} has no counterpart in transformers; --custom_code writes a "
            "modelling file for it"
        )
    first = next(candidates(config.family), None)
    if first is None:
        return f"transformers has no model of family {config.family}"
    if model_type(config) is not None:
        return None
    if config.family == "bert" and config.position_scheme != "absolute":
        return f"BertForMaskedLM uses learned positions, but this model uses {config.position}"
    if config.family == "bert_pre_ln" and config.position_scheme != "rotary":
        return "BertForMaskedLM has norms after the sublayers, but family bert_pre_ln before them"
    fills = config.family == "llama" or KINDS[first].fills
    if fills and config.emb_dim % config.num_heads:
        return f"emb_dim {config.emb_dim} is not divisible by {config.num_heads} heads"
    # The cause is the activations, head sizes or another change to the family.
    found = _plain(config, KINDS[first].fills)
    with contextlib.suppress(KeyError, UserError):
        found = _there_and_back(config, first)
    # Ignore multipliers, which can be folded away, and the family, which other fields define.
    changed = ", ".join(
        field
        for field in different_fields(found, folded(config))
        if not field.startswith("family ")
    )
    return f"transformers has no {config.family} model with {changed or 'these layers'}"


def model_type(config: ModelConfig) -> str | None:
    """Returns the model_type that computes this model in transformers, or None."""
    return exportable(config)[1]


def exportable(config: ModelConfig) -> tuple[ModelConfig, str | None]:
    """Returns the model to write (multipliers folded if needed) and its model_type or None."""
    for model in dict.fromkeys((config, folded(config))):
        for kind in candidates(config.family):
            with contextlib.suppress(KeyError, UserError):
                if same_model(_there_and_back(model, kind), model):
                    return model, kind
    return config, None


def _there_and_back(config: ModelConfig, kind: str) -> ModelConfig:
    """Returns the model read back from its config.json; KeyError if it cannot be written."""
    return from_config(_written(config, kind, positions=1), "config.json")


def same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Returns whether two configurations define the same function of parameters and batch."""
    return _function(one) == _function(other)


def _function(config: ModelConfig) -> tuple[Any, ...]:
    """Returns the spec without initial values, and the parametrisation's multipliers."""
    spec = model_spec(_inference(config))
    start = spec.shared.parametrisation
    multipliers = (
        *(start.attention_scale(each.head_dim) for each in (config, config.of_encoder)),
        start.tied_logits_multiplier(config.emb_dim) if spec.output.tied else 1.0,
    )
    if config.logits_scale is not None:
        multipliers = (*multipliers[:-1], config.logits_scale)
    return _without_start(spec), multipliers


def _without_start(spec: ModelSpec | EncoderSpec) -> ModelSpec | EncoderSpec:
    """Returns the spec without initial values and the logits' scale."""
    spec = spec.with_settings(parametrisation=None)
    if isinstance(spec, EncoderSpec) or spec.decoder.logits is None:
        return spec
    scale = None if spec.output.tied else 1.0
    logits: Any = dataclasses.replace(spec.decoder.logits, scale=scale)  # type: ignore[type-var]
    decoder = dataclasses.replace(spec.decoder, logits=logits)
    return dataclasses.replace(spec, decoder=decoder)


def different_fields(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Returns the fields that differ, with their values in `other`, such as "emb_dim 512"."""
    one, other = _explicit(one), _explicit(other)
    return [
        f"{field.name} {getattr(other, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if getattr(one, field.name) != getattr(other, field.name)
    ]


def _explicit(config: ModelConfig) -> ModelConfig:
    """Returns the model with all fields that it reads set, and no others."""
    explicit = _inference(config).explicit()
    # Initial values are not compared; the parametrisation's multipliers become explicit fields.
    start = model_spec(config).shared.parametrisation
    changed: dict[str, Any] = {"parametrisation": None, "zero_init": ()}
    if explicit.family_facts.changeable:
        changed["num_kv_heads"] = config.num_kv_heads or config.num_heads
        if config.mixer_facts.queries:
            changed["attention_scale"] = start.attention_scale(config.head_dim)
        else:
            del changed["zero_init"]
        alike = all(facts.alike for facts in config.stack_facts.values())
        if not config.mixer_facts.groups or not alike:
            del changed["num_kv_heads"]
        if logits_are_tied(config) and config.logits_scale is None:
            changed["logits_scale"] = start.tied_logits_multiplier(config.emb_dim)
    if not config.counts_positions:
        changed["max_positions"] = 512
    return dataclasses.replace(explicit, **changed)


def _inference(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        config,
        dropout_rate=0.0,
        dtype="float32",
        scan_layers=False,
        remat="none",
        attention="einsum",
        softmax_dtype="auto",
        zero_init=(),
        start_id=None,
    )


def _plain(config: ModelConfig, fills: bool) -> ModelConfig:
    """Returns the model with its family's default parts; if `fills`, heads fill the width."""
    names = ["family", "vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "tied_logits"]
    names += ["num_encoder_layers", "num_decoder_layers"]
    names += ["max_positions"] if fills else []
    plain = ModelConfig(**{name: getattr(config, name) for name in names})
    return (
        dataclasses.replace(plain, head_dim=config.emb_dim // config.num_heads) if fills else plain
    )


def to_config(
    config: ModelConfig, positions: int, mt5: bool = False, special: SpecialIds = T5_IDS
) -> dict[str, Any]:
    """Returns the contents of config.json for a model that `refusal` accepts.

    `positions` is the length of the longest training row. `mt5` labels an untied T5 as mT5.
    """
    special = special.starting(config.start_id)
    config, kind = exportable(config)
    assert kind is not None, config.family
    written = _written(config, kind, positions, special)
    if mt5 and kind == "t5" and not logits_are_tied(config):
        written |= {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}
    return written


def _written(
    config: ModelConfig, kind: str, positions: int, special: SpecialIds = T5_IDS
) -> dict[str, Any]:
    written = KINDS[kind].write(config, positions)
    pad = special.pads(begins_texts=not config.num_encoder_layers)
    if KINDS[kind].numbered:
        if special.pad is None:
            raise UserError(
                f"transformers' {kind} needs a padding id to number positions, but the vocabulary "
                "has none"
            )
        written["max_position_embeddings"] = config.max_positions + pad + 1
    # A decoder's first input during training.
    for part in (written, *(each for each in written.values() if isinstance(each, dict))):
        for name in ("bos_token_id", "decoder_start_token_id"):
            if name in part:
                part[name] = special.start
    return {
        "model_type": kind,
        **written,
        "vocab_size": config.vocab_size,
        "pad_token_id": pad,
        "eos_token_id": special.eos,
        "tie_word_embeddings": logits_are_tied(config),
        "dtype": "float32",
    }
