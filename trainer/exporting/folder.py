"""Writes a model as a folder of transformers."""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tasks.storage import files
from tasks.vocabulary import T5_IDS, Vocabulary
from trainer.huggingface import configs, folding, names, special_ids, tokenizer, weights
from trainer.model.config import ModelConfig
from trainer.model.paths import named, tree_of

_GENERATION = special_ids.GENERATION

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is written with the parameters; None for `roles` means the architecture's roles."""

    dtype: str = "float32"
    shard_bytes: int = 5 * 10**9
    vocabulary: Vocabulary | None = None
    roles: tokenizer.Roles | None = None


class Model(NamedTuple):
    """A model without scanned layers."""

    config: ModelConfig
    name: str  # its preset, or the file that describes it
    positions: int  # length of the longest training row, if known
    ids: special_ids.Ids = {}  # the special ids that a transformers folder names


def for_transformers(model: ModelConfig, arrays: Arrays) -> tuple[ModelConfig, Arrays]:
    """Folds multipliers away; returns the equivalent transformers model and its parameters."""
    plain = configs.exportable(model)[0]
    if plain == model:
        return model, arrays
    dtype = next(iter(arrays.values())).dtype
    wide = {name: array.astype(np.float32) for name, array in arrays.items()}
    folded = named(folding.fold(tree_of(wide), model))
    return plain, {name: np.asarray(array).astype(dtype) for name, array in folded.items()}


def to_transformers(
    folder: str, model: Model, arrays: Arrays, settings: Settings
) -> dict[str, Any]:
    """Writes a transformers folder without its card; returns the contents of config.json."""
    config, vocabulary = model.config, settings.vocabulary
    special = vocabulary.special if vocabulary else T5_IDS
    pad = model.ids.get("config.json", {}).get(special_ids.PAD)
    if not config.has_decoder and pad is not None:
        special = dataclasses.replace(special, pad=pad)
    written = configs.to_config(config, model.positions, model.name.startswith("mt5"), special)
    own = _generation_config(written)
    # Without a vocabulary, an id that no file names is unknown, except the decoder's start.
    known = {name for each in model.ids.values() for name in each} | {special_ids.START}
    if model.ids and not vocabulary:
        own = {name: value for name, value in own.items() if name in known}
    ids = {name: {**own, **model.ids.get(name, {})} for name in ("config.json", _GENERATION)}
    rest = {name: value for name, value in written.items() if name not in special_ids.NAMES}
    written = {**rest, **ids["config.json"], "dtype": settings.dtype}
    files.write_json(os.path.join(folder, "config.json"), written)
    files.write_json(os.path.join(folder, _GENERATION), ids[_GENERATION])
    tensors = names.to_tensors(
        tree_of(arrays), config, written["model_type"], special_ids.pad(written)
    )
    weights.write(folder, tensors, settings.shard_bytes)
    if written["model_type"] == configs.CUSTOM:
        source = os.path.join(os.path.dirname(names.__file__), f"modeling_{configs.CUSTOM}.py")
        shutil.copy(source, folder)
    if vocabulary:
        roles = settings.roles or tokenizer.Roles()
        if not config.has_encoder:
            start = vocabulary.special.starting(config.start_id).start
            roles = tokenizer.Roles(begins=vocabulary.piece(start), ends=False)
        tokenizer.write(folder, vocabulary, roles)
    return written


def _generation_config(written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of generation_config.json, given config.json's."""
    names = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
    return {name: written[name] for name in names if name in written}
