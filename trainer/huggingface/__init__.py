"""Hugging Face transformers models. `load` and `model_config` need only safetensors."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from trainer.huggingface import special_ids, weights
from trainer.model.config import ModelConfig

CONFIG = "config.json"
EXTRA = "huggingface"


def require_packages(names: Iterable[str], work: str) -> None:
    """Raises UserError if a package that `work` needs is missing, or would crash this process."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise extras.missing(work, name, EXTRA)
        if name in ("torch", "transformers"):
            extras.check_triton(work)


def model_config(path: str) -> ModelConfig:
    """Returns a model folder's configuration: of a type in `kinds.KINDS`."""
    return _read(path)[0]


def _read(path: str) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the model of a folder, and the contents of its config.json."""
    from trainer.huggingface.config_json import from_config
    from trainer.huggingface.kinds import type_of

    folder = files.local_path(path)
    where = os.path.join(folder, CONFIG)
    if not os.path.isfile(where):
        advice = ""
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not os.path.exists(folder):
            name = path.rpartition("/")[2]
            advice = (
                "; hf: takes a local folder, so download a Hub model first: "
                f"hf download {path} --local-dir={name}, then --init_from=hf:{name}"
            )
        raise UserError(f"{path} is not a transformers model folder: it has no {CONFIG}{advice}")
    try:
        written: Any = files.read_json(where)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from error
    tensors, ids = _own_tensors(folder, type_of(written)), special_ids_of(folder, written)
    return from_config(written, where, tensors, ids), written


def special_ids_of(folder: str, written: Mapping[str, Any] | None = None) -> special_ids.Ids:
    """Returns the special ids that the files of a folder name; see `special_ids.read`."""
    folder = files.local_path(folder)
    if written is None:
        written = files.read_json(os.path.join(folder, CONFIG))
    return special_ids.read(folder, CONFIG, written)


def _own_tensors(folder: str, kind: str) -> frozenset[str]:
    """Returns the names of a local folder's tensors; for T5, without copies of the embedding."""
    from trainer.huggingface.kinds import KINDS

    places = weights.places(folder)
    if kind not in KINDS or not KINDS[kind].like_t5:
        return frozenset(places)
    tables = [places[name] for name in KINDS[kind].embeddings if name in places]
    copies = {
        name
        for name in places.keys() & KINDS[kind].kernels
        if not tables or any(weights.equal(places[name], table) for table in tables)
    }
    return frozenset(places) - copies


def load(path: str, config: ModelConfig) -> dict[str, Any]:
    """Returns the float32 parameters of a model folder as an unscanned model's tree.

    Its model may differ from `config` in dropout, dtype, scan and remat. A UserError names other
    fields that differ, and tensors that are missing, unknown or misshapen.
    """
    from trainer.huggingface import configs, names
    from trainer.huggingface.kinds import KINDS, type_of

    found, written = _read(path)
    if not configs.same_model(found, config):
        differences = ", ".join(configs.different_fields(config, found))
        raise UserError(
            f"{path} is not this run's model: it has {differences}; set these as "
            "--model.FIELD=VALUE"
        )
    with extras.needed(f"{path}: reading safetensors", EXTRA):
        tensors = weights.read(files.local_path(path))
    kind, pad = type_of(written), special_ids.pad(written)
    if text := KINDS[kind].warning(found):
        print(f"{path}: {text}", file=sys.stderr)
    return names.from_tensors(tensors, found, kind, path, pad)
