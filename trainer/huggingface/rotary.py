"""Rotary positions in config.json, as transformers 5 and older releases write them."""

import math
from collections.abc import Mapping
from typing import Any

from trainer.huggingface.config_json_fields import Fields, unset
from trainer.model import registry
from trainer.model.config import ModelConfig
from trainer.model.slot import Choice

_ORIGINAL = "original_max_position_embeddings"
# Kind of rotary positions -> {transformers' field: ours}.
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency",
        "high_freq_factor": "high_frequency",
        _ORIGINAL: "original_positions",
    },
    "yarn": {
        "factor": "factor",
        _ORIGINAL: "original_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}
# Fields with defaults, which are ours, too; transformers takes 0 of the first two for none.
_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")
# Fields from which transformers computes attention_factor if a file has both and not itself.
_MSCALES = ("mscale", "mscale_all_dim")
_ROPE = ("rope_type", "type", "rope_theta")
# transformers' default base of most types.
_BASE = 10_000.0


def read(fields: Fields) -> str:
    """Returns rotary positions from rope_parameters, or from the fields of older releases.

    As in transformers 5.23, rope_scaling replaces rope_parameters, and some fields beside them are
    read, too. Raises ValueError if that would lose a value.
    """
    scaling, rope = fields.get("rope_scaling", {}), fields.get("rope_parameters", {})
    if scaling:
        base = scaling.get("rope_theta", fields.get("rope_theta", _BASE))
        if rope.get("rope_theta", base) != base:
            raise ValueError(
                f"rope_scaling replaces rope_parameters, so the base is {base:g} and not "
                f"{rope['rope_theta']:g}: move the fields of rope_scaling into rope_parameters"
            )
        rope = scaling
    if _ORIGINAL in _SCALINGS.get(_rope_type(rope), ()) and _ORIGINAL in fields:
        beside = fields.get(_ORIGINAL, 1)
        if rope.get(_ORIGINAL, beside) != beside:
            raise ValueError(
                f"{_ORIGINAL} is {beside} beside rotary positions with {rope[_ORIGINAL]}: leave "
                "out one of them"
            )
        rope = {**rope, _ORIGINAL: beside}
    return of(rope, fields)


def _rope_type(rope: Mapping[str, Any]) -> str:
    """Returns the kind of rotary positions; raises ValueError if its two spellings differ."""
    new, old = (rope.get(name) for name in ("rope_type", "type"))
    if new is not None and old not in (None, new):
        raise ValueError(f"rotary positions have rope_type {new} and type {old}: leave out type")
    return str(rope.get("rope_type", rope.get("type", "default")))


def of(
    rope: Mapping[str, Any],
    fields: Fields,
    base: float = _BASE,
    per_type: bool = False,
    **others: Any,
) -> str:
    """Returns rotary positions; `base` is transformers' default where no file names one.

    `per_type` is set if layers of other types have others, and `others` are further options.
    """
    kind = _rope_type(rope)
    if kind not in _SCALINGS:
        raise ValueError(f"rotary positions of kind {kind}, not one of {', '.join(_SCALINGS)}")
    for name, value in {**rope, **fields.present("partial_rotary_factor")}.items():
        known = name in _ROPE or name in _SCALINGS[kind] or (kind == "yarn" and name in _MSCALES)
        if not (known or unset(value) or (name, value) == ("partial_rotary_factor", 1.0)):
            raise ValueError(
                f"rotary positions of kind {kind} with {name} {value!r}, which our models lack"
            )
    fields.require("rope_interleaved", False)
    of_rope = Fields(rope, f"{fields.where}: rotary positions of kind {kind}", ())
    base = of_rope.number("rope_theta", fields.get("rope_theta", base))
    values = {"base": base, **others, **({} if kind == "default" else {"scaling": kind})}
    for theirs, ours in _SCALINGS[kind].items():
        value = rope.get(theirs)
        if theirs in _OPTIONAL and (value is None or (value == 0 and theirs in _OPTIONAL[:2])):
            continue
        if ours == "truncate":
            values[ours] = of_rope.get(theirs, True)
            if per_type and not values[ours]:
                raise ValueError("rotary positions with truncate False, which transformers ignores")
        elif ours == "original_positions":  # transformers' fallback
            given = fields if value is None else of_rope
            values[ours] = given.size("max_position_embeddings" if value is None else theirs)
        elif value is None:
            raise ValueError(f"rope_parameters of kind {kind} have no {theirs}")
        else:
            values[ours] = of_rope.number(theirs)
    if kind == "yarn" and "attention_factor" not in values and all(map(rope.get, _MSCALES)):
        logarithm = 0.1 * math.log(max(values["factor"], 1.0))
        over, under = (of_rope.number(name) * logarithm + 1 for name in _MSCALES)
        values["attention_factor"] = over / under
    return str(Choice("rotary", registry.Rotary(**values)))


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns rope_parameters; raises KeyError if positions are not rotary."""
    rotary = config.part("position").options
    if not isinstance(rotary, registry.Rotary):
        raise KeyError(config.position)
    kind = "default" if rotary.scaling == "none" else rotary.scaling
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rotary.base}
    values = {theirs: getattr(rotary, ours) for theirs, ours in _SCALINGS[kind].items()}
    return rope | {theirs: value for theirs, value in values.items() if value is not None}


def for_both_majors(rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of rotary positions that transformers 5 reads, and those that 4 reads."""
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    older = {} if rope["rope_type"] == "default" else {"rope_scaling": scaling}
    return {"rope_parameters": rope, "rope_theta": rope["rope_theta"], **older}
