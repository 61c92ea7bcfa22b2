"""The field layer_types: which layers see a window."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.huggingface.config_json_fields import Fields, unset
from trainer.model.config import ModelConfig
from trainer.model.slot import Choice
from trainer.model.windows import GLOBAL, LOCAL, Sliding

SLIDING, FULL = "sliding_attention", "full_attention"
_PLAIN = ("rope_type", "rope_theta")
_LETTERS = {SLIDING: LOCAL, FULL: GLOBAL}


def read(fields: Fields, window: int | None, default: Sequence[str], **others: Any) -> str:
    """Returns an attention_window; `default` are transformers' types of all layers.

    `others` are further options. Raises ValueError for other types of layers.
    """
    types = fields.get("layer_types", list(default))
    if unknown := [each for each in types if each not in (SLIDING, FULL)]:
        raise ValueError(f"layer_types has {unknown[0]}, not only {SLIDING} and {FULL}")
    if len(types) != len(default):
        raise ValueError(f"layer_types has {len(types)} layers, the model {len(default)}")
    letters = "".join(_LETTERS[each] for each in types)
    if window is None or LOCAL not in letters:
        return "none"
    return text(Sliding(window=window, layers=_period(letters), **others))


def text(window: Sliding, **changes: Any) -> str:
    """Returns the attention_window of windows with some options changed."""
    return str(Choice("sliding", replace(window, **changes)))


def _period(letters: str) -> str:
    """Returns the shortest letters that give all of them if they are repeated."""
    for size in range(1, len(letters)):
        if (letters[:size] * len(letters))[: len(letters)] == letters:
            return letters[:size]
    return letters


def ropes(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns rope_parameters of global and local layers, {} for those that have none.

    Raises ValueError if the file has fields outside them, which transformers ignores.
    """
    both = fields.get("rope_parameters", {})
    if outside := both.keys() - {*_LETTERS}:
        raise ValueError(
            f"rope_parameters has {min(outside)} beside {FULL} and {SLIDING}: write it into them"
        )
    known = Fields(both, f"{fields.where}: rope_parameters", ())
    of_global, of_local = (
        known.section(each) if both.get(each) is not None else {} for each in (FULL, SLIDING)
    )
    return of_global, of_local


def local_base(rope: Mapping[str, Any], base: float) -> float:
    """Returns the base in local layers' rope_parameters; `base` is the one of files without it.

    Raises ValueError if they have more than a base.
    """
    if unknown := {name for name, value in rope.items() if not unset(value)} - {*_PLAIN}:
        raise ValueError(f"rope_parameters of {SLIDING} have {min(unknown)}")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary positions of kind {rope['rope_type']} in local layers")
    return Fields(rope, f"rope_parameters of {SLIDING}", ()).number("rope_theta", base)


def window_of(config: ModelConfig) -> Sliding | None:
    """Returns the options of a model's windows, or None if it has none."""
    options = config.part("attention_window").options
    return options if isinstance(options, Sliding) else None


def written(config: ModelConfig, layers: int | None = None) -> list[str]:
    """Returns the types of a stack's `layers`, or of the layers of a model with one stack."""
    window = window_of(config)
    count = layers or config.num_decoder_layers or config.num_encoder_layers
    letters = window.layers if window else GLOBAL
    names = {letter: name for name, letter in _LETTERS.items()}
    return [names[letter] for letter in (letters * count)[:count]]
