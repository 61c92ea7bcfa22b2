"""Primer and its rivals, trained on the same rows in the same order and compared.

    python -m experiments.primer --output=DIR --cache_dir=DIR --task=c4_autoregressive_lm \\
        [--size=mini] [--arms=transformer_vanilla,primer_ez] [--seeds=0,1,2] [--steps=2000] \\
        [--step_times=FILE] [--field.path=value]

An arm is a preset, SIZE_ARM; the first is the baseline. Each arm and seed is a run of
trainer.pretrain in OUTPUT/ARM/seed_K, and any field of its configuration is a flag: all arms have
the same. What a run reads depends on its seed alone, so arms of one seed read the same rows in the
same order; every evaluation is on the whole validation split. The same command again goes on where
it was stopped and leaves finished runs as they are.

It ends with comparison.md, comparison.png and comparison.json in OUTPUT: final losses, differences
from the baseline by pairs of one seed, and the factors by which an arm needs fewer updates and less
time to be as good as the baseline is at its end. Time is that of the runs themselves or, with
`--step_times`, what benchmarks.variants wrote, measured side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import subprocess
import sys

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, RawHelp, UserError

ARMS = (
    "transformer_vanilla,transformer_gelu,transformer_plusplus,transformer_squared_relu,"
    "transformer_mdha,primer_ez,primer,primer_as_released"
)


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="python -m experiments.primer", description=__doc__, formatter_class=RawHelp
    )
    parser.add_argument("--output", required=True, help="folder of the runs and of what they say")
    parser.add_argument("--task", required=True, help="a task of a language model")
    parser.add_argument("--cache_dir", required=True, help="what pipeline.build wrote")
    parser.add_argument("--size", default="mini", help="mini, small, medium or large")
    parser.add_argument("--arms", default=ARMS, help=f"the first is the baseline: {ARMS}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=2000, help="updates of each run")
    parser.add_argument("--step_times", help="JSON of seconds by preset, of benchmarks.variants")
    arguments, overrides = parser.parse_known_args(argv)
    arms = _arms(arguments)
    seeds = _seeds(arguments.seeds)
    times = _step_times(arguments, arms)
    # So that the run that is under way ends too: the next command would start it twice.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for seed in seeds:
        for arm, preset in arms.items():
            code = _train(arguments, overrides, arm, preset, seed)
            if code:
                return code
        _report(arguments, arms, seeds, times)
    return 0


def _arms(arguments: argparse.Namespace) -> dict[str, str]:
    """Presets by arm."""
    from trainer.config.presets import model_preset

    arms = {}
    for arm in arguments.arms.split(","):
        arms[arm] = f"{arguments.size}_{arm}"
        if model_preset(arms[arm]).architecture != "decoder":
            raise UserError(f"--arms={arm}: {arms[arm]} is no decoder-only model")
    return arms


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds={text}: give whole numbers, as 0,1,2") from error


def _step_times(arguments: argparse.Namespace, arms: dict[str, str]) -> dict[str, float]:
    if not arguments.step_times:
        return {}
    try:
        times = files.read_json(arguments.step_times)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"--step_times={arguments.step_times}: {error}; benchmarks.variants --output writes it"
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
    """Trains to the end, or finds that it has; returns the exit code of the trainer."""
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
    """Writes and prints what the finished runs say."""
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
