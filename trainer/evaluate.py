"""Evaluates checkpoints of a run on a whole split.

python -m trainer.evaluate --model_dir=DIR [--steps=all|latest|1000,2000] [--task=TASK]
    [--split=SPLIT] [--metrics=NAME,NAME] [--plot=FILE.png]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError, positive
from trainer.config.processes import add_processes_flags, processes_of
from trainer.reporting.evaluations import evaluation_table

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data.prepared import Run

# By split, each metric's value; the first split is the one asked for, others are SPLIT/TASK.
Results = dict[str, dict[str, float]]
_CHECKPOINTS = "checkpoints"


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m trainer.evaluate", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model_dir", required=True, help="folder of the run, local or remote")
    add(
        *("--steps", "--checkpoints"),
        default="latest",
        help="checkpoints to evaluate: all, latest, or steps separated by commas",
    )
    add("--split", default="validation", help="split of the cache to evaluate on")
    add(
        "--output",
        help="file to write the metrics to, JSON lines if it ends with .jsonl and JSON otherwise; "
        "without it, they are added to MODEL_DIR/evaluation.json",
    )
    add("--plot", help="PNG of the metrics over steps to write")
    add("--task", help="another task than the run's, or task=rate,task=rate")
    add("--task_module", help="Python module that registers tasks and metrics")
    add("--metrics", help="metrics of generated text, as exact_match,bleu; task: the task's own")
    add("--supervised", help="one of T5's tasks, as glue_mrpc, that judges predictions on a cache")
    add(
        "--examples",
        type=positive,
        help="most examples of each task to generate text for; without it, the run's own number",
    )
    add("--probes", help="JSON lines with probes to score; docs/finetuning.md")
    add("--cache_dir", help="folder that holds the caches, if it has moved since training")
    add(
        "--batch_size",
        type=positive,
        help="rows per batch; without it, the run's own. It changes the metrics of models with "
        "Switch layers only",
    )
    add_processes_flags(parser)
    arguments = parser.parse_args(argv)
    for flag in ("output", "plot"):
        if path := getattr(arguments, flag):
            _check_output(flag, path)
    shared = processes_of(arguments)

    from trainer.engine import processes

    with processes.joined(shared):
        _evaluate(arguments)


def _evaluate(arguments: argparse.Namespace) -> None:
    from trainer.config import fields, load_config

    config, origins = load_config(arguments.model_dir)
    label = arguments.split
    if arguments.task and arguments.task != config.task:
        config, label = (
            _on_another_task(config, origins, arguments.task),
            (f"{arguments.task}:{arguments.split}"),
        )
    overrides = {
        "model_dir": arguments.model_dir,
        "cache_dir": arguments.cache_dir,
        "task_module": arguments.task_module,
        "evaluation.batch_size": arguments.batch_size,
        "evaluation.metrics": arguments.metrics and tuple(arguments.metrics.split(",")),
        "evaluation.supervised": arguments.supervised,
        "evaluation.examples": arguments.examples,
        "evaluation.probes": arguments.probes,
    }
    # What the run did about its evaluations does not bind this one.
    for path in ("checkpoint.best_metric", "stopping.metric", "plateau.metric"):
        config = fields.replace(config, path, None)
    for path, value in overrides.items():
        if value is not None:
            config = fields.replace(config, path, value)

    from trainer.engine import determinism

    determinism.set_flags(config.deterministic)

    from trainer.checkpoints.checkpoint import Checkpoints, chosen_steps
    from trainer.config.this_machine import on_this_machine
    from trainer.data.task_record import warn_of_changes
    from trainer.engine import processes
    from trainer.engine.program import Program
    from trainer.evaluating.evaluation import Evaluation
    from trainer.reporting.metrics import EVALUATION_FILE
    from trainer.setup import prepare

    run = prepare(on_this_machine(config), origins)
    if label == arguments.split:
        warn_of_changes(arguments.model_dir, run.data.tasks_record)
    checkpoints = Checkpoints(arguments.model_dir, writable=False)
    steps = chosen_steps(arguments.steps, checkpoints.steps(), arguments.model_dir)
    _check_vocabulary(run, checkpoints.path(steps[0]))
    program = Program(run)
    evaluation = Evaluation(run, arguments.split, program, label)
    output = arguments.output or files.join(arguments.model_dir, EVALUATION_FILE)
    # Read first: if it is damaged, the user should not wait for the evaluation to be told.
    add_to = not arguments.output and files.exists(output)
    before = files.read_json(output).get(_CHECKPOINTS, {}) if add_to else {}
    results: dict[int, Results] = {}
    for step in steps:
        found = evaluation(checkpoints.restore(step, program.abstract_state()).params, step)
        assert found is not None
        results[step] = found
        if not processes.is_first():
            continue
        # Written each time: a later checkpoint may be damaged.
        if output.endswith(".jsonl"):
            files.write_bytes(output, _as_lines(results).encode())
        else:
            files.write_json(output, {_CHECKPOINTS: merged(before, results, label)})
    checkpoints.close()
    print(evaluation_table(results))
    if arguments.plot and processes.is_first():
        from trainer.reporting.drawing import draw_metrics

        draw_metrics(results, arguments.plot, f"{config.preset} on {config.task}")


def _check_vocabulary(run: Run, checkpoint: str) -> None:
    """Refuses data whose vocabulary is not the one that a checkpoint records, if both are known."""
    from trainer.checkpoints import metadata

    trained, now = (
        metadata.read(checkpoint).get("vocabulary_sha256"),
        run.data.vocabulary_sha256,
    )
    if trained and now and trained != now:
        raise UserError(
            f"{checkpoint} was trained with another vocabulary than that of {run.config.task} in "
            f"{run.config.cache_dir}: build its cache with the run's vocabulary"
        )


def _on_another_task(config: Config, origins: dict[str, str], task: str) -> Config:
    """Returns `config` with another task; lengths that followed from the old task do so anew."""
    from trainer.config import MixingConfig, fields

    for side in ("inputs", "targets"):
        path = f"lengths.{side}"
        if origins.get(path, "").startswith("task "):
            del origins[path]
            config = fields.replace(config, path, None)
    # What the old task's data were checked against or implied does not bind another task.
    config = fields.replace(config, "objective", ())
    config = fields.replace(config, "mixing", MixingConfig())
    origins.setdefault("model.vocab_size", config.model_dir)
    if origins["model.vocab_size"].startswith("preset"):
        origins["model.vocab_size"] = config.model_dir
    return fields.replace(config, "task", task)


def _as_lines(results: dict[int, Results]) -> str:
    """Returns JSON lines {"step", "split", "metrics"}."""
    return "".join(
        json.dumps({"step": step, "split": split, "metrics": values}) + "\n"
        for step, by_split in results.items()
        for split, values in by_split.items()
    )


def merged(
    before: dict[str, Results], results: dict[int, Results], split: str
) -> dict[str, Results]:
    """Returns evaluations by step, ascending: `results`, and those before of other rows.

    Args:
      before: earlier evaluations.
      results: new ones, which replace those of the same step and split.
      split: the split that was evaluated.
    """
    rows = dict(before)
    for step, result in results.items():
        others = {
            name: values
            for name, values in rows.get(str(step), {}).items()
            if name.partition("/")[0] != split
        }
        rows[str(step)] = {**others, **result}
    return {step: rows[step] for step in sorted(rows, key=int)}


def _check_output(flag: str, output: str) -> None:
    """Makes the folder of a file, before hours are spent on what is to be written into it."""
    if files.is_remote(output):
        return
    path = os.path.abspath(files.local_path(output))
    if os.path.isdir(path):
        name = "metrics.png" if flag == "plot" else "metrics.json"
        raise UserError(f"--{flag}={output} is a folder: name a file, such as {output}/{name}")
    files.make_folder(os.path.dirname(path))


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
