"""Runs of tiny models on a small cache: flags, data, updates, processes, and what they leave."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support import in_process
from tests.support.trees import assert_equal
from tests.support.words import changed
from trainer.config import Config
from trainer.config.from_flags import build_config

ROOT = pathlib.Path(__file__).parents[2]
TASK = "python_docs_span_corruption"
TINY = "t5_1_1_tiny"


def flags_of(
    cache: object, model_dir: object = "nowhere", *more: str, task=TASK, lengths=(64, 18)
) -> list[str]:
    """Returns flags of trainer.pretrain; of two flags with one name, the last counts.

    Args:
      lengths: of inputs and targets; None is the task's own.
    """
    sides = zip(("inputs", "targets"), lengths, strict=True)
    return changed(
        *(f"--task={task}", f"--cache_dir={cache}", f"--model_dir={model_dir}", "--batch_size=4"),
        *(f"--lengths.{side}={length}" for side, length in sides if length is not None),
        *more,
    )


def config_of(*flags: str, preset: str = TINY) -> Config:
    return build_config(preset, changed(*flags))[0]


def run_of(cache: object, *flags: str, preset: str = TINY, training: bool = False, **named: Any):
    """Returns a prepared run on a cache."""
    from trainer.setup import prepare

    return prepare(*build_config(preset, flags_of(cache, "nowhere", *flags, **named)), training)


def assert_shared(batches: Callable[[int, int], Any], steps: Iterable[int], hosts=(2, 4)) -> None:
    """Asserts that hosts make parts of the batches of one host.

    Args:
      batches: returns the batches of a host, by its number and their count.
    """
    whole = batches(0, 1)
    for step, count in itertools.product(steps, hosts):
        parts = [batches(host, count)[step] for host in range(count)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert_equal(joined, whole[step])


def stub(config: Config, **data: Any) -> Any:
    """Returns a run without data, for what reads its configuration alone."""
    facts = {"tasks": (), "fingerprints": {}, "record": {}, "vocabulary_sha256": None} | data
    return SimpleNamespace(config=config, data=SimpleNamespace(**facts))


def program_of(config: Config):
    """Returns the program of a configuration."""
    from trainer.engine.program import Program

    return Program(stub(config))


def updated(program, batches: Iterable[Any]) -> tuple[Any, list[float]]:
    """Returns the state after one update for each batch, and the loss of each update."""
    from trainer.engine.sharding import put_batch

    state, losses = program.initial_state(), []
    for batch in batches:
        state = state.replace(metrics=program.zero_metrics())
        state = program.train_step(state, put_batch(batch, program.mesh))
        losses.append(float(np.divide(*state.metrics["loss"])))
    return state, losses


def trained(cache: object, model_dir: pathlib.Path, *flags: str, **named: Any) -> pathlib.Path:
    """Trains in this process; returns the run's folder."""
    from trainer import loop
    from trainer.setup import prepare

    config, origins = build_config(TINY, flags_of(cache, model_dir, *flags, **named))
    assert loop.train(prepare(config, origins), origins) == 0
    return model_dir


def curve(model_dir: object) -> list[dict[str, Any]]:
    """Returns every line of a run's metrics without the speed."""
    from trainer.reporting.metrics import read_metrics

    return [{**line, "speed": None} for line in read_metrics(str(model_dir))]


def losses(model_dir: object) -> dict[tuple[str, int], float]:
    """Returns losses by split and step, and checks that each line was written once."""
    lines = curve(model_dir)
    found = {(line["split"], line["step"]): line["metrics"].get("loss") for line in lines}
    assert len(found) == len(lines)
    return found


def metadata(model_dir: pathlib.Path, step: int) -> dict[str, Any]:
    """Returns what a checkpoint records beside its state."""
    return json.loads((model_dir / f"checkpoint_{step}/run/metadata").read_text())


def state(model_dir: pathlib.Path, step: int) -> Any:
    """Returns the arrays of a checkpoint, on this machine's first device."""
    import jax
    import orbax.checkpoint as ocp

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    folder, reader = model_dir / f"checkpoint_{step}" / "state", ocp.StandardCheckpointer()
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        reader.metadata(folder).item_metadata.tree,
    )
    return reader.restore(folder, shapes)


def command(module: str, *flags: object) -> list[str]:
    """Returns the words that run a command in a process of its own."""
    return [sys.executable, "-m", module, *map(str, flags)]


def pretrain(cache: object, model_dir: object, *flags: str, preset: str = TINY, **named: Any):
    """Returns the words of trainer.pretrain, which reports every update."""
    given = flags_of(cache, model_dir, "--metrics.every_steps=1", *flags, **named)
    return command("trainer.pretrain", f"--preset={preset}", *given)


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, which saves its start."""
    return in_process.run(arguments[2], *arguments[3:])


def done(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, which must succeed."""
    made = run(arguments)
    assert made.returncode == 0, made.stderr
    return made


def start(arguments: Sequence[str], **how: Any) -> subprocess.Popen[str]:
    """Starts a command from the root of the project."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(arguments, **pipes | how)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start_all(
    arguments: Sequence[str], *more: str, count: int = 2, devices: int = 1, **how: Any
) -> list[subprocess.Popen[str]]:
    """Starts the processes of one run, each with `devices` devices."""
    port, few = free_port(), f" --xla_force_host_platform_device_count={devices}"
    how = {"env": os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + few}} | how
    shared = (f"--processes.coordinator=localhost:{port}", f"--processes.count={count}")
    return [
        start([*arguments, *shared, f"--processes.index={index}", *more], **how)
        for index in range(count)
    ]


def finish(processes: Iterable[subprocess.Popen[str]], code: int = 0) -> list[tuple[str, str]]:
    """Returns (stdout, stderr) of processes, which must end with this code."""
    both = [(process, process.communicate(timeout=400)) for process in processes]
    for process, (_, errors) in both:
        assert process.returncode == code, errors
    return [said for _, said in both]
