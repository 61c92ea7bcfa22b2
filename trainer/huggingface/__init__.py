"""Models of transformers: what ours are called there, folders of theirs as our parameters.

`load` and `model_config` need safetensors alone; torch and transformers only `trainer.export`.
"""

from __future__ import annotations

import os
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.model.config import ModelConfig

CONFIG = "config.json"
EXTRA = "pip install 'palimpsest[huggingface]'"


def model_config(path: str) -> ModelConfig:
    """The model in a folder of transformers: T5, mT5, BERT, Llama, or our own modelling file.

    Raises:
      UserError: there is no such folder, or a model that ours are not; says in which field.
    """
    from trainer.huggingface import configs

    folder = files.local_path(path)
    where = os.path.join(folder, CONFIG)
    if not os.path.isfile(where):
        raise UserError(f"{path} is no model folder of transformers: there is no {CONFIG}")
    try:
        written = files.read_json(where)
    except ValueError as error:
        raise UserError(f"{where} is no JSON: {error}") from error
    return configs.from_config(written, where)


def load(path: str, config: ModelConfig) -> dict[str, Any]:
    """Parameters float32 of a folder of transformers, as the tree of `config`'s unscanned model.

    Args:
      path: a local folder with config.json and safetensors, in one file or several.
      config: the model that they are for; its dropout, dtype, scan and remat are its own affair.

    Raises:
      UserError: the folder's model is another one, or tensors are missing, too many or of other
        shapes; names the fields or the tensor.
    """
    from trainer.huggingface import configs, names

    found = model_config(path)
    if not configs.same_model(found, config):
        differences = ", ".join(configs.different_fields(config, found))
        raise UserError(
            f"{path} is another model than this run's: it has {differences}; set these as "
            "--model.FIELD=VALUE"
        )
    try:
        from trainer.huggingface import weights

        tensors = weights.read(files.local_path(path))
    except ImportError as error:
        raise UserError(f"{path}: reading safetensors needs {error.name}: {EXTRA}") from error
    return names.from_tensors(tensors, found, path)
