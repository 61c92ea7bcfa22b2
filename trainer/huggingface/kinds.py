"""The registry of transformers' model types."""

from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.huggingface.fields import Fields
from trainer.model.config import ModelConfig


class Kind(NamedTuple):
    """A model_type of transformers, its config.json and its tensors.

    Attributes:
      read: returns the model of a config.json.
      write: returns a model's fields of config.json; gets the length of the longest training row.
        It raises KeyError if the type cannot express the model; `configs.model_type` finds other
        differences by reading the result back.
      tensors: returns path of a parameter in the unscanned tree -> name of a module.
      families: families whose models may be of this type.
      beginning: beginning of all names but the heads', which a model without a head lacks.
      inert: more fields without effect on the logits; `fields` lists the fields that no type reads.
      start: the field with the id that a decoder reads first if decoder_start_token_id is missing.
      kernel: path and module of the kernel of untied logits.
      numbered: path of a table of positions that begins with rows for the padding id and the ids
        below it, as RoBERTa's does; we keep the others.
      blank: returns name -> shape of tensors that our models lack, written as zeros.
      unread: beginnings of the names of such tensors that a folder may have.
      copies: names of copies of the token embedding that transformers 4 needs if logits are untied.
      compared: transformers' classes whose logits are compared with ours.
    """

    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig, int], dict[str, Any]]
    tensors: Callable[[ModelConfig], dict[str, str]]
    families: tuple[str, ...] = ()
    beginning: str = ""
    inert: frozenset[str] = frozenset()
    start: str = "pad_token_id"
    kernel: tuple[str, str] = ("decoder/logits_dense/kernel", "lm_head")
    numbered: str = ""
    blank: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {}
    unread: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()


# model_type -> its row.
KINDS: dict[str, Kind] = {}


def candidates(family: str) -> list[str]:
    """Returns a family's model_types: first the one of its name, the others as registered."""
    found = [name for name, kind in KINDS.items() if family in kind.families]
    return sorted(found, key=lambda name: name != family)
