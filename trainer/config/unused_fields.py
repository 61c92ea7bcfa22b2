"""Settings that have no effect next to the others, refused when a user types them.

Only the command refuses them, and only values that were typed: a stored configuration stays
readable, and presets and gin files may set what their model or task does not use. Resuming ignores
them (`resuming.config_changes`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import fields
from trainer.config.run import Config
from trainer.model.config import ModelConfig


class _Idle(NamedTuple):
    """Fields that are idle while a condition holds, and why."""

    paths: tuple[str, ...]
    condition: Callable[[Config], bool]
    why: str


def _divided(config: Config) -> bool:
    """Returns whether a batch may have several parts."""
    return config.microbatches > 1 or config.tokens_per_microbatch_per_replica is not None


def _layers(model: ModelConfig) -> int:
    return max(model.num_encoder_layers, model.num_decoder_layers)


_RULES = (
    _Idle(
        ("data.block_bytes",),
        lambda config: config.data.shuffle != "block",
        "it goes with --data.shuffle=block",
    ),
    _Idle(
        ("data.follow_shards", "data.follow_timeout_seconds"),
        lambda config: not config.data.follow,
        "it goes with --data.follow=true",
    ),
    _Idle(
        ("data.order",),
        lambda config: config.task.startswith("seqio:"),
        "seqio orders the rows of its tasks",
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
        ("loss.normalize_over",),
        lambda config: config.loss.normalizer == "sum" or not _divided(config),
        "it goes with --microbatches and a --loss.normalizer other than sum",
    ),
    _Idle(
        ("evaluation.decoding.batch_size",),
        lambda config: True,
        "predictions have the rows of --evaluation.batch_size",
    ),
    _Idle(
        ("evaluation.decoding.prefix",),
        lambda config: True,
        "prompts are read as the task's inputs are in training",
    ),
    _Idle(
        ("processes.timeout_seconds",),
        lambda config: config.processes.coordinator is None,
        "it goes with a --processes.coordinator",
    ),
    _Idle(
        ("model.max_positions",),
        lambda config: not config.model.counts_positions,
        "it goes with --model.position=absolute or a Synthesizer",
    ),
    _Idle(
        ("optimizer.scale_epsilon",),
        lambda config: config.model.part("parametrisation").name != "mup",
        "it goes with --model.parametrisation=mup",
    ),
    _Idle(
        ("model.switch_every",),
        lambda config: not config.model.num_experts,
        "it goes with --model.num_experts",
    ),
    _Idle(
        ("model.num_experts",),
        lambda config: config.model.switch_every > _layers(config.model),
        "no stack has as many layers as --model.switch_every, so none of them has experts",
    ),
    _Idle(
        ("model.mlp_bias",),
        lambda config: config.model.num_experts > 0 and config.model.switch_every == 1,
        "all layers have experts, whose projections have no bias",
    ),
)


def unread_fields(config: Config) -> dict[str, str]:
    """Returns field path -> reason, for the fields that have no effect in this configuration."""
    return {path: rule.why for rule in _RULES if rule.condition(config) for path in rule.paths}


def refuse_idle(config: Config, origins: Mapping[str, str]) -> None:
    """Refuses fields that were set on the command line, differ from the default, and are not read.

    Raises:
      UserError: names the flag and the reason.
    """
    values = dict(fields.leaves(config))
    defaults = dict(fields.leaves(Config(config.preset, config.model)))
    defaults |= {f"model.{each.name}": each.default for each in dataclasses.fields(ModelConfig)}
    for path, why in unread_fields(config).items():
        if origins.get(path) == "command line" and values[path] != defaults[path]:
            raise UserError(f"--{path} has no effect: {why}")
