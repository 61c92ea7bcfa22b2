"""The text with which a run explains its configuration before its first step."""

import shutil
import sys
import textwrap
from collections.abc import Mapping

from trainer.config import CheckpointConfig, Config
from trainer.config.presets import source_optimizer
from trainer.data.run import Run
from trainer.engine import determinism
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.engine.program import Program
from trainer.model.attention_cores import EINSUM
from trainer.model.config import ModelConfig
from trainer.model.device import AUTO, Device
from trainer.optim.schedule import described


def startup_text(
    run: Run,
    origins: Mapping[str, str],
    program: Program,
    step: int,
    begins: str,
    changes: list[str],
) -> str:
    """Returns lines about data, model, mesh, the run, and `changes` to software or hardware."""
    config = run.config
    lengths = run.converter.encoder_length, run.converter.decoder_length
    flops = flops_per_step(config.model, config.batch_size, *lengths)
    lines = [
        *run.data.consequences(step, *program.host_part),
        (
            "model",
            f"{config.preset}: {parameter_count(config.model):,} parameters, "
            f"{flops / 1e9:,.1f} GFLOP per step, {config.model.dtype}",
        ),
        *_rates(config, origins),
        program.describe(),
        *program.tuning.describe(),
        *_choices(config.model, program.mesh.devices.flat[0].device_kind),
        (
            "this run",
            f"{begins}, up to step {config.train_steps}{_why(origins)}; "
            f"{_checkpoint_policy(config.checkpoint)}; after an interruption, the same command "
            f"resumes from the newest checkpoint, {determinism.promise()}",
        ),
        ("", _bad_update_policy(config)),
    ]
    if changes and step:
        lines.append(
            (
                "changed",
                f"since the last start: {'; '.join(changes)}; results may differ by rounding from "
                "those of an uninterrupted run",
            )
        )
    return "\n".join(_filled(f"{subject:<13} {text}") for subject, text in lines)


def _why(origins: Mapping[str, str]) -> str:
    origin = origins.get("train_steps", "")
    return f" ({origin})" * origin.startswith("--train_tokens")


def _filled(line: str) -> str:
    """Returns a line broken as the terminal needs it; a file gets whole lines."""
    if not sys.stdout.isatty():
        return line
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(line, width, subsequent_indent=" " * 14, break_on_hyphens=False)


def _rates(config: Config, origins: Mapping[str, str]) -> list[tuple[str, str]]:
    words = f"{config.optimizer.name}, " + origins.get("optimizer.name", "T5X's default")
    source = source_optimizer(config.preset)
    if source and not {"optimizer.name", "optimizer.schedule"} & origins.keys():
        words += f"; the source of {config.preset} trains with {source}"
    lines = [
        ("optimizer", words),
        ("learning rate", described(config.optimizer, config.train_steps)),
    ]
    if config.train_steps < config.optimizer.warmup_steps:
        lines.append(
            (
                "warning",
                f"the run ends at update {config.train_steps:,}, before its "
                f"--optimizer.warmup_steps={config.optimizer.warmup_steps}",
            )
        )
    return lines


def _choices(model: ModelConfig, device_kind: str) -> list[tuple[str, str]]:
    """Returns a line about the attention that "auto" chooses on an accelerator; [] on a CPU."""
    if device_kind == "cpu" or model.attention != AUTO:
        return []
    attention = model.attention_on(device_kind)
    softmax = Device(device_kind).softmax_dtype(model.softmax_dtype, model.dtype)
    fused = attention != EINSUM
    how = "fused kernels, softmax in float32" if fused else f"logits and softmax in {softmax}"
    return [("attention", f"{attention}, chosen by auto: {how}")]


def _checkpoint_policy(policy: CheckpointConfig) -> str:
    when = f"every {policy.every_steps} steps" if policy.every_steps else "at the end"
    kept = [f"the newest {policy.keep}"] if policy.keep else []
    if policy.keep and policy.keep_every_steps:
        kept.append(f"one every {policy.keep_every_steps} steps")
    if policy.keep and policy.best_metric:
        kept.append(f"the one with the best {policy.best_metric}")
    return f"a checkpoint {when}, keeping {' and '.join(kept) or 'all'}"


def _bad_update_policy(config: Config) -> str:
    what = "a non-finite update"
    if config.spike_factor:
        what += f", or one whose loss is above {config.spike_factor:g} times the mean,"
    if config.on_nan == "skip":
        return f"{what} is skipped and counted"
    return f"{what} is not applied: the run saves the state before it and stops"
