"""Trains Primer and the models it is compared with on the same rows, and compares the results.

    python -m experiments.primer --output=DIR --cache_dir=DIR --task=c4_autoregressive_lm \\
        [--size=mini] [--arms=transformer_vanilla,primer_ez] [--seeds=0,1,2] [--steps=2000] \\
        [--step_times=FILE] [--field.path=value]

An arm is the preset SIZE_ARM; the first arm is the baseline. Each arm is trained with each seed, by
trainer.pretrain in OUTPUT/ARM/seed_K. Any field of the trainer's configuration is a flag and
applies to all arms. The rows that a run reads depend only on its seed, so arms with the same seed
read the same rows in the same order. Every evaluation covers the whole validation split. Rerun the
same command to resume; finished runs are kept.

The results are written to comparison.md, comparison.png and comparison.json in OUTPUT: final
losses, differences from the baseline paired by seed, and how many times fewer steps and less time
an arm needs to reach the baseline's final loss. Times are those of the runs themselves or, with
`--step_times`, those that benchmarks.variants measured side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import subprocess
import sys

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, RawHelp, UserError, positive

_ARMS = (
    "transformer_vanilla,transformer_gelu,transformer_plusplus,transformer_squared_relu,"
    "transformer_mdha,primer_ez,primer,primer_as_released"
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(
        prog="python -m experiments.primer", description=__doc__, formatter_class=RawHelp
    )
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder for the runs and the comparison")
    add("--task", required=True, help="language-modeling task to train on")
    add("--cache_dir", required=True, metavar="DIR", help="folder with caches by task")
    add("--size", default="mini", help="size of the models: tiny, mini, small, medium or large")
    add("--arms", default=_ARMS, help="comma-separated arms; the first is the baseline")
    add("--seeds", default="0,1,2", help="comma-separated seeds; every arm is trained with each")
    add("--steps", type=positive, default=2000, help="number of updates of each run")
    add(
        "--step_times",
        metavar="FILE",
        help="JSON of seconds per step by preset, as written by benchmarks.variants --output",
    )
    arguments, overrides = parser.parse_known_args(argv)
    arms = _arms(arguments)
    seeds = _seeds(arguments.seeds)
    times = _step_times(arguments, arms)
    # Exiting also ends the training run, so that the next command does not start it a second time.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for seed in seeds:
        for arm, preset in arms.items():
            code = _train(arguments, overrides, arm, preset, seed)
            if code:
                return code
        _report(arguments, arms, seeds, times)
    return 0


def _arms(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the preset of each arm."""
    from trainer.config.presets import model_preset

    arms = {}
    for arm in arguments.arms.split(","):
        arms[arm] = f"{arguments.size}_{arm}"
        if model_preset(arms[arm]).architecture != "decoder":
            raise UserError(f"--arms={arm}: {arms[arm]} is not a decoder-only model")
    return arms


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds={text}: give whole numbers, such as 0,1,2") from error


def _step_times(arguments: argparse.Namespace, arms: dict[str, str]) -> dict[str, float]:
    """Returns seconds per step by preset; empty without --step_times."""
    if not arguments.step_times:
        return {}
    try:
        times = files.read_json(arguments.step_times)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"--step_times={arguments.step_times}: {error}; write the file with "
            "benchmarks.variants --output"
        ) from error
    missing = [preset for preset in arms.values() if preset not in times]
    if missing:
        raise UserError(
            f"--step_times={arguments.step_times} lacks {missing[0]}: measure it with "
            f"benchmarks.variants --presets={','.join(arms.values())}"
        )
    return times


def _model_dir(arguments: argparse.Namespace, arm: str, seed: int) -> str:
    return files.join(arguments.output, arm, f"seed_{seed}")


def _train(
    arguments: argparse.Namespace, overrides: list[str], arm: str, preset: str, seed: int
) -> int:
    """Runs the trainer, which returns at once if the run is finished; returns its exit code."""
    every = max(1, arguments.steps // 20)
    command = [
        f"--preset={preset}",
        f"--task={arguments.task}",
        f"--cache_dir={arguments.cache_dir}",
        f"--model_dir={_model_dir(arguments, arm, seed)}",
        f"--train_steps={arguments.steps}",
        f"--seed={seed}",
        f"--evaluation.every_steps={every}",
        f"--metrics.every_steps={every}",
        f"--checkpoint.every_steps={5 * every}",
        "--checkpoint.keep=1",
        *overrides,
    ]
    print(f"{arm}, seed {seed}", flush=True)
    return subprocess.run([sys.executable, "-m", "trainer.pretrain", *command]).returncode


def _report(
    arguments: argparse.Namespace,
    arms: dict[str, str],
    seeds: list[int],
    times: dict[str, float],
) -> None:
    """Writes and prints the comparison of the finished runs."""
    from experiments import comparison
    from trainer.config import load_config
    from trainer.engine.cost import parameter_count
    from trainer.reporting.metrics import read_metrics

    curves: dict[str, dict[int, comparison.Curve]] = {}
    parameters: dict[str, int] = {}
    for arm, preset in arms.items():
        curves[arm] = {}
        for seed in seeds:
            model_dir = _model_dir(arguments, arm, seed)
            found = comparison.curve(read_metrics(model_dir), times.get(preset))
            if found and found.steps[-1] == arguments.steps:
                curves[arm][seed] = found
                parameters[arm] = parameter_count(load_config(model_dir)[0].model)
    baseline = next(iter(arms))
    compared = comparison.compare(curves, baseline)
    text = comparison.table(compared, parameters)
    print(text, flush=True)
    result = {
        "baseline": baseline,
        "arms": {name: dataclasses.asdict(arm) for name, arm in compared.items()},
        "curves": {
            name: {seed: dataclasses.asdict(one) for seed, one in by_seed.items()}
            for name, by_seed in curves.items()
        },
    }
    files.write_json(files.join(arguments.output, "comparison.json"), result)
    files.write_bytes(files.join(arguments.output, "comparison.md"), f"{text}\n".encode())
    comparison.draw(curves, baseline, files.join(arguments.output, "comparison.png"))


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
