"""The registry of transformers' model types, the core's and the annexes'."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tasks.annexes import Registry
from trainer.huggingface.config_json_fields import Fields, unset
from trainer.model.config import ModelConfig
from trainer.model.registry import FAMILIES


class Kind(NamedTuple):
    """A model_type of transformers, its config.json and its tensors.

    Attributes:
      read: returns the model of a config.json.
      write: returns a model's fields of config.json; gets the length of the longest training row.
        It raises KeyError if the type cannot express the model; `configs.model_type` finds other
        differences by reading the result back.
      tensors: returns path of a parameter in the unscanned tree -> name of a module.
      families: families whose models may be of this type, beside those that name it themselves.
      beginning: beginning of all names but the heads', which a model without a head lacks.
      inert: fields without effect on the logits, beside those in `config_json_fields`.
      start: the field with the id that a decoder reads first if decoder_start_token_id is missing.
      kernel: path and module of the kernel of untied logits.
      numbered: path of a table of positions that begins with rows for the padding id and the ids
        below it, as RoBERTa's does; we keep the others.
      blank: returns name -> shape of tensors that our models lack, written as zeros.
      unread: beginnings of the names of such tensors that a folder may have.
      copies: names of copies of the token embedding that transformers 4 needs if logits are untied.
      compared: transformers' classes whose logits are compared with ours.
      like_t5: config.json says in T5's fields if logits are tied and scaled.
      fills: heads fill the width: there is no field for their size.
      transposed: torch's kernels are [out, in].
      joined: module -> the kernels that it holds as one tensor.
      bare: path of a parameter -> a tensor that belongs to no module.
      mixers: mixers that it has beside those that any type may have.
      embeddings: names under which a folder may have the token embedding.
      heads: beginnings of the names of heads.
      twice: tensors that some folders store twice -> the originals.
      unused: endings of the names of tensors without effect.
      missing: beginning of tensor names -> what a folder without such tensors is, and a remedy.
      warning: returns what to tell about a model's weights, or None.
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
    like_t5: bool = False
    fills: bool = False
    transposed: bool = True
    joined: Mapping[str, tuple[str, ...]] = {}
    bare: Mapping[str, str] = {}
    mixers: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ("model.embed_tokens.weight",)
    heads: tuple[str, ...] = ("lm_head.",)
    twice: Mapping[str, tuple[str, ...]] = {}
    unused: tuple[str, ...] = ()
    missing: Mapping[str, str] = {}
    warning: Callable[[ModelConfig], str | None] = lambda config: None

    @property
    def kernels(self) -> frozenset[str]:
        """The kernel of the logits, which is the embedding again if they are tied."""
        return frozenset({f"{self.kernel[1]}.weight"} - self.twice.keys())


# model_type -> its row; "TYPE with FIELD" or "TYPE with FIELD=VALUE" is a variant of a type, of
# folders whose config.json has this field. `formats` adds the core's.
KINDS: Registry[Kind] = Registry("transformers_types", {})


def type_of(written: Mapping[str, Any]) -> str:
    """Returns the name in KINDS of a config.json: its model_type, or the variant that it has."""
    kind = str(written.get("model_type"))
    for name in KINDS:
        base, _, mark = name.partition(" with ")
        field, _, value = mark.partition("=")
        found = written.get(field)
        if mark and base == kind and not unset(found) and value in ("", str(found)):
            return name
    return kind


def candidates(family: str) -> Iterator[str]:
    """Yields a family's model_types: the one of its name, then the core's, then the annexes'."""
    if family in KINDS and family in KINDS[family].families:
        yield family
    for name in KINDS:
        if name != family and (family in KINDS[name].families or name in FAMILIES[family].types):
            yield name
