"""Models of runs that start from a transformers folder, read from its config.json."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import Given
from trainer.config import field_paths
from trainer.config.run import Config
from trainer.config.stored import CONFIG_FILE, stored_model
from trainer.model.config import ModelConfig

PREFIX = "hf:"
_READER = "trainer.huggingface"
# Annexes' groups of settings that make another model of a folder's, and how.
_MODELS = "folder_models"
# Fields that a folder does not determine: how the model is trained and computed.
_OURS = ("dropout_rate", "dtype", "scan_layers", "remat", "attention", "softmax_dtype")


def is_folder(name: str) -> bool:
    """Returns whether a value of --init_from names a transformers folder."""
    return name.startswith(PREFIX)


def is_of_transformers(folder: str) -> bool:
    """Returns whether transformers wrote the config.json of a folder, given without "hf:"."""
    path = files.join(folder, "config.json")
    return bool(folder) and files.exists(path) and "model_type" in files.read_json(path)


def named_folder(given: Given) -> str | None:
    """Returns the value of --init_from if it names a transformers folder."""
    value = given.values.get("init_from")
    return value if value and is_folder(value) else None


def folder_model(given: Given) -> ModelConfig:
    """Returns the model of `named_folder(given)`, without dropout."""
    kinds = {name: annexes.get("settings", name) for name in annexes.entries(_MODELS)}
    groups = {
        name: field_paths.override(kind(), {}, given.below(name)) for name, kind in kinds.items()
    }
    model = _model(given.values.get("init_from"), given.values.get("model_dir"), groups)
    return dataclasses.replace(model, dropout_rate=0.0)


def adopt_model(config: Config, origins: dict[str, str]) -> Config:
    """Returns `config` with the model of the folder named by --init_from, if any.

    Keeps fields set on the command line and fields that a folder does not determine; records
    origins. A run that has begun no longer needs the folder: its record has the model.
    """
    source = config.init_from or ""
    if not source.startswith(PREFIX):
        return config
    groups = {name: getattr(config, name) for name in annexes.entries(_MODELS)}
    found = _model(source, config.model_dir, groups)
    if found.architecture != config.model.architecture:
        others = "".join(f" with {group}" for group in groups.values() if group.on)
        raise UserError(
            f"--init_from={source}{others} is a {found.family} model, but "
            f"--preset={config.preset} is a {config.model.family} model: leave out --preset to use "
            "the folder's model"
        )
    taken = {
        f"model.{name}": value
        for name, value in field_paths.leaves(found)
        if name not in _OURS and origins.get(f"model.{name}") != "command line"
    }
    return field_paths.implied(config, origins, taken, source)


def _model(source: str | None, model_dir: str | None, groups: Mapping[str, Any]) -> ModelConfig:
    """Returns a folder's model, or the recorded one if the run in model_dir began from it.

    `groups` are the settings of annexes that may make another model of it.
    """
    source, path = source or "", files.join(model_dir or "", CONFIG_FILE)
    if model_dir and files.exists(path):
        stored = files.read_json(path).get("config", {})
        if stored.get("init_from") == source:
            return stored_model(stored["model"], path)
    # Imported here because it reads another library's formats.
    read = importlib.import_module(_READER).model_config
    found: ModelConfig = read(source.removeprefix(PREFIX))
    for name, group in groups.items():
        if group.on:
            found = annexes.get(_MODELS, name)(group, found, source)
    return found
