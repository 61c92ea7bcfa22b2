"""Rejects fields without effect on the command line; records, presets and gin may set them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.config import field_paths
from trainer.config.run import Config
from trainer.model.config import ModelConfig


def unread_fields(config: Config) -> dict[str, str]:
    """Returns field path -> reason, for fields without effect in this configuration."""
    return dict(_unread(config, config, ""))


def _unread(part: Any, config: Config, path: str) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(part):
        inner, read_if = f"{path}{field.name}", field.metadata.get("read_if")
        value, subject = getattr(part, field.name), config if read_if and read_if.whole else part
        nested = dataclasses.is_dataclass(value)
        if read_if and not read_if.holds(subject):
            names = [name for name, _ in field_paths.leaves(value, inner)] if nested else [inner]
            yield from dict.fromkeys(names, read_if.reason(subject)).items()
        elif nested:
            yield from _unread(value, config, f"{inner}.")
            yield from ((f"{inner}.{name}", why) for name, why in field.metadata["unread"].items())


def refuse_unread(config: Config, origins: Mapping[str, str]) -> None:
    """Raises a UserError for unread fields that the command line changes from the default."""
    values = dict(field_paths.leaves(config))
    defaults = dict(field_paths.leaves(Config(config.preset, config.model)))
    defaults |= {f"model.{field.name}": field.default for field in dataclasses.fields(ModelConfig)}
    for path, why in unread_fields(config).items():
        if origins.get(path) == "command line" and values[path] != defaults[path]:
            raise UserError(f"--{path} has no effect {why}")
