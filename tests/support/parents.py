"""Folders that a sweep's runs start from."""

import functools
import json
import pathlib
import tempfile
from dataclasses import replace

from trainer.config import Config, save_config
from trainer.config.presets import model_preset
from trainer.huggingface import configs


@functools.cache
def decoder() -> str:
    """Returns a folder with the config.json of a small decoder, without weights."""
    folder = tempfile.mkdtemp(prefix="palimpsest_parent_")
    model = replace(model_preset("llama_mini"), family="gemma", norm_placement="sandwich")
    path = pathlib.Path(folder, "config.json")
    path.write_text(json.dumps(configs.to_config(model, 128)))
    return folder


@functools.cache
def run() -> str:
    """Returns the folder of a run of ours with its configuration, without checkpoints."""
    folder = tempfile.mkdtemp(prefix="palimpsest_run_")
    save_config(Config("t5_1_1_tiny", model_preset("t5_1_1_tiny"), model_dir=folder), {}, {})
    return folder
