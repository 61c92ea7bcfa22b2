"""A run's configuration as its folder stores it: config.json, also of earlier versions."""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from tasks import annexes, registry
from tasks.storage import files, seal
from tasks.terminal.command_line import UserError
from trainer.config import field_paths
from trainer.config.data import DataConfig
from trainer.config.run import Config
from trainer.model.config import ModelConfig

CONFIG_FILE = "config.json"
# Fields that determine batches, beside those of which `changes` says it.
_OF_BATCHES = (
    "preset",
    "model",
    "task_module",
    "train_steps",
    "train_tokens",
    "tokens_per_batch",
    "data",
)
# Folders in which a run is looked for, if it is not where it should be.
_INNER = 20


def save_config(
    config: Config, origins: dict[str, str], record: Mapping[str, Any] | None = None
) -> None:
    """Writes config.json into the model directory; `record` describes the run's tasks."""
    value = {"config": as_stored(config), "origins": origins, **(record or {})}
    files.write_json(files.join(config.model_dir, CONFIG_FILE), seal.sealed(value))


def load_record(model_dir: str) -> dict[str, Any]:
    """Returns the task record of the run in `model_dir`; {} if it has none."""
    value = files.read_json(files.join(model_dir, CONFIG_FILE))
    return {name: value[name] for name in ("tasks", "rates") if name in value}


def load_vocabulary_record(model_dir: str) -> dict[str, Any] | None:
    """Returns the record of the vocabulary in a run's folder, as JSON; None if it has none."""
    return files.read_json(files.join(model_dir, CONFIG_FILE)).get("vocabulary")


def _runs_in(folder: str) -> list[str]:
    """Returns the runs in the first folders of a folder."""
    inner = (files.join(folder, name) for name in files.list_names(folder)[:_INNER])
    return [each for each in inner if files.exists(files.join(each, CONFIG_FILE))]


def refuse_average(value: Mapping[str, Any], source: str) -> None:
    """Raises UserError if a stored configuration's state, to be continued, has a moving average."""
    if (decay := _decay(value)) is not None:
        raise UserError(
            f"{source} is of a run with averages.ema_decay={decay}, which is gone: start another "
            f"from its parameters with --init_from={source} --init_from_state=false, and use "
            "--average=last:K"
        )


def _decay(value: Mapping[str, Any]) -> float | None:
    decay: float | None = value.get("averages", {}).get("ema_decay")
    return decay


@functools.cache
def _say_average(model_dir: str, decay: float) -> None:
    print(
        f"{model_dir}: the run kept a moving average (averages.ema_decay={decay}), which is gone: "
        "its plain parameters are read",
        file=sys.stderr,
    )


def as_stored(config: Config) -> dict[str, Any]:
    """Returns what is stored of a configuration: all but the groups of annexes at their defaults.

    So a run that uses nothing of an annex is read where the annex is deleted.
    """
    groups = annexes.loaded("settings").items()
    idle = [name for name, kind in groups if getattr(config, name) == kind()]
    return {name: each for name, each in dataclasses.asdict(config).items() if name not in idle}


def as_batches(config: Config) -> dict[str, Any]:
    """Returns what is stored of a configuration and determines its batches, as JSON values.

    That leaves out the caches' folder and how fast they are read.
    """
    changing = {each.name for each in dataclasses.fields(Config)
                if each.metadata["changes"] in ("batches", "later_batches")}  # fmt: skip
    named = {*changing, *_OF_BATCHES, *annexes.entries("caches")}
    found = {name: each for name, each in as_stored(config).items() if name in named}
    own = [each.name for each in dataclasses.fields(DataConfig)
           if each.metadata["changes"] != "nothing"]  # fmt: skip
    found["data"] = {name: found["data"][name] for name in own}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def stored_config(value: Mapping[str, Any], source: str) -> Config:
    """Returns the configuration that `source`, a run's folder or file, holds as JSON.

    Settings of earlier versions are read where they are now, but for a moving average, which is
    left out. Raises UserError for one that is unknown, missing or of another type.
    """
    left_out = {"averages", *_unset_groups(value)}
    own = _copied({name: each for name, each in value.items() if name not in left_out})
    return field_paths.from_dict(Config, _moved(own), source)


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copied(each) if isinstance(each, Mapping) else each for name, each in table.items()
    }


def _unset_groups(value: Mapping[str, Any]) -> set[str]:
    """Returns the unknown groups without a value that is set: of an annex that is not here.

    Earlier versions stored the groups of all annexes.
    """
    unknown = value.keys() - {each.name for each in dataclasses.fields(Config)}
    groups = {name: value[name] for name in unknown if isinstance(value[name], dict)}
    return {name for name, group in groups.items() if not any(group.values())}


def stored_model(value: Mapping[str, Any], source: str) -> ModelConfig:
    """Returns the model that `source` holds as JSON, also of an earlier version."""
    return field_paths.from_dict(ModelConfig, _moved({"model": dict(value)})["model"], source)


def _moved(config: dict[str, Any]) -> dict[str, Any]:
    """Moves settings of earlier versions to other paths, or by functions "module:name".

    A function gets the group that had the setting, and its value.
    """
    moves = annexes.entries("moved_settings")
    firsts = {path.partition(".")[0] for path in (*moves, *moves.values()) if "." in path}
    if not all(isinstance(config.get(name, {}), dict) for name in firsts):
        return config  # from_dict refuses it
    for old, new in moves.items():
        *groups, name = old.split(".")
        table = functools.reduce(lambda table, group: table.get(group, {}), groups, config)
        if name not in table:
            continue
        value = table.pop(name)
        if ":" in new:
            annexes.load(new)(table, value)
        else:
            group, name = new.split(".")
            config.setdefault(group, {})[name] = value
    return config


def load_config(model_dir: str) -> tuple[Config, dict[str, str]]:
    """Returns (the configuration of the run in `model_dir`, field path -> origin).

    Says if the run kept a moving average: only its plain parameters are read.
    """
    path = files.join(model_dir, CONFIG_FILE)
    if not files.exists(path):
        run, _, name = model_dir.rstrip("/").rpartition("/")
        advice = "train one with trainer.pretrain"
        if name.startswith("checkpoint_") and files.exists(files.join(run or ".", CONFIG_FILE)):
            advice = f"name the run, {run or '.'}; --step or --steps chooses a checkpoint"
        elif inner := _runs_in(model_dir):
            advice = f"name the run, {inner[0]}"
        raise UserError(f"{model_dir} holds no run (it has no {CONFIG_FILE}): {advice}")
    value = files.read_json(path)
    if not (isinstance(value, dict) and isinstance(value.get("config"), dict)):
        raise UserError(f"{path} has no configuration of a run: restore it from a copy")
    value, is_whole = seal.opened(value)
    if is_whole is False:
        raise UserError(
            f"{path} was damaged or edited, since it does not match its sha256: restore it from a "
            "copy, or delete that entry to use the file as it is"
        )
    # It may register values that the configuration names.
    if value["config"].get("task_module"):
        registry.load(value["config"]["task_module"])
    if (decay := _decay(value["config"])) is not None:
        _say_average(model_dir, decay)
    return stored_config(value["config"], path), value.get("origins", {})
