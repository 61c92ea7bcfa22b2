"""Evaluation of a run's checkpoints on a whole split."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.checkpoints import averages, metadata
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import Config, MixingConfig, field_paths
from trainer.config import averages as averages_config
from trainer.config.evaluation import BEST_METRICS, EvaluateFlags
from trainer.config.this_machine import on_this_machine
from trainer.data import segments
from trainer.data.run import Run
from trainer.data.task_record import warn_of_changes
from trainer.engine import determinism, processes
from trainer.engine.program import Program
from trainer.evaluating.evaluation import Evaluation
from trainer.reporting.evaluations import evaluation_table
from trainer.reporting.metrics import EVALUATION_FILE
from trainer.setup import prepare

# split -> metric -> value; the first split is the requested one, others are SPLIT/TASK.
Results = dict[str, dict[str, float]]
_CHECKPOINTS = "checkpoints"


def evaluate(flags: EvaluateFlags) -> dict[int, Results]:
    """Evaluates checkpoints, writes their metrics and prints a table; returns them by step."""
    config, origins = metadata.load_config(flags.model_dir)
    label = flags.split
    if flags.task and flags.task != config.task:
        config = _on_another_task(config, origins, flags.task)
        label = f"{flags.task}:{flags.split}"
    overrides = {
        "model_dir": flags.model_dir,
        "cache_dir": flags.cache_dir,
        "task_module": flags.task_module,
        "evaluation.batch_size": flags.batch_size,
        "evaluation.metrics": flags.metrics and tuple(flags.metrics.split(",")),
        "evaluation.supervised": flags.supervised,
        "evaluation.examples": flags.examples,
    }
    # The run's reactions to evaluations, and its limit on their size, do not apply here.
    unset = ("checkpoint.best_metric", "stopping.metric", "evaluation.batches")
    values: dict[str, Any] = dict.fromkeys(unset)
    if config.plateau.metric is not None:
        values["plateau.metric"] = BEST_METRICS[0]  # the checkpoints hold its scale of the rate
    values |= {path: value for path, value in overrides.items() if value is not None}
    values |= {name: type(getattr(config, name))() for name in annexes.entries("evaluations")}
    config = field_paths.replace_all(config, values)

    determinism.set_flags(config.deterministic)

    run = _opened(config, origins, another=label != flags.split)
    if label == flags.split:
        warn_of_changes(flags.model_dir, run.data.tasks_record)
    checkpoints = Checkpoints(flags.model_dir, writable=False)
    steps = averages.steps_of(flags.steps, checkpoints, flags.model_dir, flags.average)
    _check_vocabulary(run, checkpoints.path(steps[0]))
    program = Program(run)
    evaluation = Evaluation(run, flags.split, program, label)
    written = averages_config.label(label, flags.average) if flags.average else label

    def of_step(step: int) -> Results:
        params = averages.parameters(checkpoints, step, program, flags.average)
        found = evaluation(params, step, average=flags.average)
        assert found is not None
        return found

    results = recorded(flags, steps, written, of_step)
    checkpoints.close()
    print(evaluation_table(results))
    if flags.plot and processes.is_first():
        from trainer.reporting.drawing import draw_metrics

        draw_metrics(results, flags.plot, f"{config.preset} on {config.task}")
    return results


def recorded(
    flags: EvaluateFlags,
    steps: Sequence[int],
    written: str | None,
    of_step: Callable[[int], Results],
) -> dict[int, Results]:
    """Returns the results of each step, which it also writes to the output that the flags name.

    There they replace all those of the same steps under the name `written`; None: of their names.
    """
    output = flags.output or files.join(flags.model_dir, EVALUATION_FILE)
    # Read this first, to report damage before the evaluation.
    add_to = not flags.output and files.exists(output)
    before = files.read_json(output).get(_CHECKPOINTS, {}) if add_to else {}
    results: dict[int, Results] = {}
    for step in steps:
        results[step] = of_step(step)
        if not processes.is_first():
            continue
        # Write after each checkpoint: a later one may be damaged.
        if output.endswith(".jsonl"):
            files.write_bytes(output, _as_lines(results).encode())
        else:
            files.write_json(output, {_CHECKPOINTS: merged(before, results, written)})
    return results


def _check_vocabulary(run: Run, checkpoint: str) -> None:
    """Rejects data whose vocabulary differs from the checkpoint's, if both are known."""
    trained = metadata.read(checkpoint).get("vocabulary_sha256")
    now = run.data.vocabulary_sha256
    if trained and now and trained != now:
        raise UserError(
            f"{checkpoint} was trained with a different vocabulary from {run.config.task} in "
            f"{run.config.cache_dir}: build its cache with the run's vocabulary"
        )


def _on_another_task(config: Config, origins: dict[str, str], task: str) -> Config:
    """Returns `config` with another task, which implies the lengths that the old one implied."""
    paths = ("lengths.inputs", "lengths.targets")
    implied = [path for path in paths if origins.get(path, "").startswith("task ")]
    for path in implied:
        del origins[path]
    if origins.get("model.vocab_size", "preset").startswith("preset"):
        origins["model.vocab_size"] = config.model_dir
    # The old task's objective, mixing and reading do not apply to another task.
    values = {"objective": (), "mixing": MixingConfig(), "task": task}
    values |= {"data.take": None}
    return field_paths.replace_all(config, {**dict.fromkeys(implied), **values})


def _opened(config: Config, origins: dict[str, str], another: bool) -> Run:
    """Returns the run; `another` task has segments by document if its rows can have them."""
    config = on_this_machine(config)
    try:
        return prepare(config, origins)
    except segments.Unsegmented as error:
        if not another:
            raise
        print(f"segments      none: {error}")
    return prepare(field_paths.replace(config, "data.segment_documents", False), origins)


def _as_lines(results: dict[int, Results]) -> str:
    return "".join(
        json.dumps({"step": step, "split": split, "metrics": values}) + "\n"
        for step, by_split in results.items()
        for split, values in by_split.items()
    )


def merged(
    before: dict[str, Results], results: dict[int, Results], split: str | None
) -> dict[str, Results]:
    """Merges `results` into `before`, replacing equal steps of the same `split`; sorts by step.

    `split` None replaces equal names only.
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
