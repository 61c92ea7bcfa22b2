"""Reads transformers' config.json, of every model_type that is registered."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.huggingface import formats as formats
from trainer.huggingface import special_ids
from trainer.huggingface.config_json_fields import Fields, unset
from trainer.huggingface.kinds import KINDS, type_of
from trainer.model.config import ModelConfig


def from_config(
    written: Mapping[str, Any],
    where: str,
    tensors: Collection[str] = (),
    ids: special_ids.Ids | None = None,
) -> ModelConfig:
    """Returns the model of a config.json at `where`: its sizes and dropout, otherwise our defaults.

    `tensors` are the folder's tensor names, if known: transformers 5 records every T5's logits as
    tied, but stores the kernel of untied logits. `ids` are the folder's special ids, if known.
    A UserError names an unsupported or unknown field.
    """
    kind = type_of(written)
    if kind not in KINDS:
        types = sorted(name for name in KINDS if " " not in name)
        raise UserError(f"{where}: model_type is {kind}, not one of {', '.join(types)}")
    fields = {name: value for name, value in written.items() if not unset(value)}
    nulls = frozenset(name for name, value in written.items() if value is None)
    known = Fields(fields, where, tensors, nulls)
    try:
        for name in ("add_cross_attention", "tie_encoder_decoder"):
            known.require(name, False)
        model = KINDS[kind].read(known)
        known.refuse_unknown(KINDS[kind].inert)
        if ids and model.has_both_stacks:
            start = special_ids.start(ids, where, model.vocab_size, KINDS[kind].start)
            model = dataclasses.replace(model, start_id=start)
        return model
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
