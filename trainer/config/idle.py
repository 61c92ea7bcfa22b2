"""Settings that would have no effect next to the others, refused when a user types them.

Only the command checks this, and only values that were typed: a stored configuration stays
readable, and presets and gin files may set what their model or task does not use.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import fields
from trainer.config.run import Config


class _Idle(NamedTuple):
    """Fields that are idle while a condition holds, and why."""

    paths: tuple[str, ...]
    condition: Callable[[Config], bool]
    why: str


_RULES = (
    _Idle(
        ("data.block_bytes",),
        lambda config: config.data.shuffle != "block",
        "it goes with --data.shuffle=block",
    ),
    _Idle(
        ("data.local_dir", "data.local_bytes"),
        lambda config: bool(config.cache_dir) and not files.is_remote(config.cache_dir),
        "--cache_dir is local, so nothing is copied",
    ),
    _Idle(
        ("checkpoint.keep_every_steps",),
        lambda config: config.checkpoint.keep is None,
        "with --checkpoint.keep=None every checkpoint is kept",
    ),
    _Idle(
        ("evaluation.batch_size", "evaluation.batches"),
        lambda config: not config.evaluation.every_steps,
        "with --evaluation.every_steps=0 training never evaluates",
    ),
    _Idle(
        ("processes.timeout_seconds",),
        lambda config: config.processes.coordinator is None,
        "it goes with a --processes.coordinator",
    ),
)


def idle(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (field path, why it has no effect) of the fields that differ from their defaults."""
    values = dict(fields.leaves(config))
    defaults = dict(fields.leaves(Config(config.preset, config.model)))
    for rule in _RULES:
        if rule.condition(config):
            for path in rule.paths:
                if values[path] != defaults[path]:
                    yield path, rule.why


def refuse_idle(config: Config, origins: Mapping[str, str]) -> None:
    """Refuses fields that were set on the command line and have no effect.

    Raises:
      UserError: names the flag and the reason.
    """
    for path, why in idle(config):
        if origins.get(path) == "command line":
            raise UserError(f"--{path} has no effect: {why}")
