"""Models of runs that start from a transformers folder, read from its config.json."""

import dataclasses
import importlib

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import Given
from trainer.config import fields
from trainer.config.run import CONFIG_FILE, Config
from trainer.model.config import ModelConfig

PREFIX = "hf:"
_READER, _ADAPTER = "trainer.huggingface", "trainer.starting.adapting"
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
    names = ("init_from", "model_dir", "adapt", "adapt_encoder")
    model = _model(*(given.values.get(name) for name in names))
    return dataclasses.replace(model, dropout_rate=0.0)


def adopt_model(config: Config, origins: dict[str, str]) -> Config:
    """Returns `config` with the model of the folder named by --init_from, if any.

    Keeps fields set on the command line and fields that a folder does not determine; records
    origins. A run that has begun no longer needs the folder: its record has the model.
    """
    source = config.init_from or ""
    if not source.startswith(PREFIX):
        return config
    found = _model(source, config.model_dir, config.adapt, config.adapt_encoder)
    if found.architecture != config.model.architecture:
        adapted = f" with --adapt={config.adapt}" if config.adapt else ""
        raise UserError(
            f"--init_from={source}{adapted} is a {found.family} model, but "
            f"--preset={config.preset} is a {config.model.family} model: leave out --preset to use "
            "the folder's model"
        )
    taken = {
        f"model.{name}": value
        for name, value in fields.leaves(found)
        if name not in _OURS and origins.get(f"model.{name}") != "command line"
    }
    origins |= dict.fromkeys(taken, source)
    return fields.replace_all(config, taken)


def _model(
    source: str | None, model_dir: str | None, adapt: str | None, encoder: str | None
) -> ModelConfig:
    """Returns a folder's model, or the recorded one if the run in model_dir began from it.

    With `adapt`, that is the model made of the folder's decoder, and of the one in `encoder`.
    """
    source, path = source or "", files.join(model_dir or "", CONFIG_FILE)
    if model_dir and files.exists(path):
        stored = files.read_json(path).get("config", {})
        if stored.get("init_from") == source:
            return fields.from_dict(ModelConfig, stored["model"], path)
    # Imported here because it reads another library's formats.
    read = importlib.import_module(_READER).model_config
    found: ModelConfig = read(source.removeprefix(PREFIX))
    if adapt is None:
        return found
    second = (read(encoder.removeprefix(PREFIX)), encoder) if encoder else None
    made: ModelConfig = importlib.import_module(_ADAPTER).adapted(adapt, found, source, second)
    return made
