"""Compares optimizers after the same steps on the same batches, each at its best learning rate.

    python -m benchmarks.optimizers --cache_dir=demo/cache [--steps=600] [--seeds=0,1,2] \\
        [--only=muon,lion]

Uses the demo's model, lengths and batch size, and a cosine schedule after 50 steps of warm-up.
Prints a line per run of trainer.pretrain with its final loss over the whole validation split, in
nats per target token; then a table of the means over seeds, with the minimum and maximum. A seed
determines initial parameters, order and noise, equally for all optimizers. Optimizers are compared
after equal numbers of steps, not seconds.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from benchmarks.machine import machine
from tasks.terminal.command_line import Parser, positive
from tasks.terminal.table import table

TASK = "python_docs_span_corruption"
_WARMUP_STEPS = 50


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """An optimizer with its settings, and the learning rates to try."""

    label: str
    flags: dict[str, object]
    learning_rates: tuple[float, ...]


_CLIP = {"clip_norm": 1.0}
_NO_DECAY = {"weight_decay": 0.0}
_SCALED = {"multiply_by_parameter_scale": True}
ROWS = (
    Row("adafactor", {}, (0.01, 0.02, 0.03, 0.05)),
    Row("adafactor-momentum", {"beta1": 0.9}, (0.01, 0.02, 0.03, 0.05)),
    Row("adamw", {"name": "adamw", **_CLIP}, (1e-3, 2e-3, 4e-3, 8e-3)),
    Row("adamw_rms", {"name": "adamw_rms", **_CLIP}, (0.01, 0.02, 0.04, 0.08)),
    Row("adamw_rms-0.95", {"name": "adamw_rms", **_CLIP, "beta2": 0.95}, (0.01, 0.02, 0.04)),
    Row("lion", {"name": "lion", **_CLIP, **_NO_DECAY}, (1e-4, 3e-4, 1e-3)),
    Row("lion-rms", {"name": "lion", **_CLIP, **_NO_DECAY, **_SCALED}, (2e-3, 5e-3, 0.01)),
    Row(
        "muon-unscaled",
        {"name": "muon", **_CLIP, "multiply_by_parameter_scale": False},
        (2e-3, 5e-3, 0.01, 0.02),
    ),
    Row("muon", {"name": "muon", **_CLIP, **_SCALED}, (0.02, 0.04, 0.08, 0.16)),
)


def main() -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.optimizers", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cache_dir", required=True, help=f"folder of caches by task, with one of {TASK}")
    add("--steps", type=positive, default=600, help="updates of a run")
    add("--seeds", default="0", help="seeds of runs, separated by commas")
    labels = ", ".join(row.label for row in ROWS)
    add("--only", help=f"optimizers to compare, separated by commas; all if left out: {labels}")
    add(
        "--rates",
        help="learning rates to try, separated by commas; each optimizer's own if left out",
    )
    add("--workers", "--processes", type=positive, default=1, help="runs at the same time")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else [row.label for row in ROWS]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    runs = [
        (row, rate, seed)
        for row in ROWS
        if row.label in chosen
        for rate in _rates(row, arguments.rates)
        for seed in seeds
    ]

    def loss(run: tuple[Row, float, int]) -> float:
        result = train(*run, arguments)
        label, rate, seed = run[0].label, *run[1:]
        print(f"{label:<20} learning rate {rate:<8g} seed {seed} {result:.4f}", flush=True)
        return result

    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        losses = dict(zip(runs, pool.map(loss, runs), strict=True))
    rows = []
    for row in ROWS:
        found = {
            rate: [losses[row, rate, seed] for seed in seeds]
            for its_row, rate, _ in runs
            if its_row is row
        }
        if found:
            means = {rate: statistics.fmean(values) for rate, values in found.items()}
            best = min(means, key=means.__getitem__)
            shown = ", ".join(f"{rate:g}: {mean:.3f}" for rate, mean in means.items())
            between = f"{min(found[best]):.3f} to {max(found[best]):.3f}"
            rows.append((row.label, f"{best:g}", f"{means[best]:.3f} ({between})", shown))
    header = ("optimizer", "best learning rate", "validation loss", "loss by learning rate")
    print(f"\n{machine()}")
    print(table(header, rows, markdown=True))


def train(row: Row, rate: float, seed: int, arguments: argparse.Namespace) -> float:
    """Returns the final validation loss in nats per target token; infinity if the run diverged."""
    fields = {
        "learning_rate": rate,
        **row.flags,
        "schedule": "constant * linear_warmup * cosine_decay",
        "warmup_steps": _WARMUP_STEPS,
        "steps_per_cycle": arguments.steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "trainer.pretrain", "--preset=t5_1_1_mini", f"--task={TASK}"),
            *(f"--cache_dir={arguments.cache_dir}", f"--model_dir={folder}"),
            *(f"--train_steps={arguments.steps}", f"--seed={seed}", "--batch_size=8"),
            *("--lengths.inputs=128", "--lengths.targets=29", "--metrics.tensorboard=false"),
            *("--checkpoint.every_steps=1000000", "--evaluation.every_steps=1000000"),
            "--loss.normalizer=num_real_target_tokens",
            *(f"--optimizer.{name}={value}" for name, value in fields.items()),
        ]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        if run.returncode:
            if "loss is" not in run.stderr:
                raise SystemExit(run.stderr)
            return float("inf")
        lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    return [line["metrics"]["loss"] for line in written if line["split"] == "validation"][-1]


def _rates(row: Row, given: str | None) -> tuple[float, ...]:
    return tuple(float(rate) for rate in given.split(",")) if given else row.learning_rates


if __name__ == "__main__":
    main()
