"""Rewinds a run: `--rewind_to` goes on from an earlier checkpoint of its folder."""

import re
import sys

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata
from trainer.checkpoints.checkpoint import Checkpoints, chosen_steps
from trainer.config import Config, config_changes, resuming, stored_config
from trainer.data.run import Run
from trainer.engine import processes
from trainer.engine.damage import Damaged
from trainer.evaluating.predictions import PREDICTIONS
from trainer.reporting.metrics import EVALUATION_FILE, METRICS_FILE

_FLAG = "--rewind_to"
# Answers are called STEP.jsonl or STEP.AVERAGE.jsonl, predictions SPLIT_STEP.jsonl.
_OF_STEP = re.compile(r"(?:.*_)?(\d+)(?:\.[a-z0-9]+)?\.jsonl")


def target(run: Run, checkpoints: Checkpoints) -> int | None:
    """Returns the checkpoint to go back to; None if that is not asked, or was done before.

    Raises a UserError, in all processes, if there is no such checkpoint.
    """
    step, folder = run.config.rewind_to, run.config.model_dir
    if step is None:
        return None
    steps = checkpoints.steps()
    with processes.failing_together():
        if _is_done(step, run.config, checkpoints, steps):
            return None
        try:
            chosen_steps(str(step), steps, folder)
        except UserError as error:
            raise UserError(f"{_FLAG}={step}: {error}") from error
    return step


def _is_done(step: int, now: Config, checkpoints: Checkpoints, steps: list[int]) -> bool:
    """Returns whether the newest checkpoint was made by a run with these settings after a rewind.

    Otherwise a run that was killed after its rewind would go back again.
    """
    for newest in reversed(steps):
        try:
            stored = metadata.read(checkpoints.path(newest))
        except Damaged:
            continue
        rewinds = [each["by"] for each in stored.get("history", ()) if "rewind" in each["by"]]
        if rewinds[-1:] != [resuming.rewind_entry(step)]:
            return False
        before = stored_config(stored["config"], now.model_dir)
        return not config_changes(before, now, newest)
    return False


def set_aside(config: Config, checkpoints: Checkpoints, step: int) -> None:
    """Renames the checkpoints after `step`, and keeps the metrics of those updates beside them."""
    newest = checkpoints.steps()[-1]
    if newest == step:
        return
    if processes.is_first():
        metrics = files.join(config.model_dir, METRICS_FILE)
        if files.exists(metrics):
            copy = files.join(checkpoints.path(newest), METRICS_FILE)
            files.write_bytes(copy, files.read_bytes(metrics))
        _forget_evaluations(files.join(config.model_dir, EVALUATION_FILE), step)
        _move_answers(config.model_dir, step, checkpoints.path(newest))
    moved = checkpoints.set_aside(step, "rewound")
    if processes.is_first():
        print(
            f"{_FLAG}={step}: renamed later checkpoints to {', '.join(reversed(moved))}, with the "
            f"metrics so far in {moved[0]}/{METRICS_FILE}; delete them when they are not needed",
            file=sys.stderr,
        )


def _move_answers(model_dir: str, step: int, target: str) -> None:
    """Moves predictions, and files of other evaluations, of later checkpoints into `target`."""
    for folder in (*annexes.entries("evaluations"), PREDICTIONS):
        place = files.join(model_dir, folder)
        for name in files.list_names(place):
            found = _OF_STEP.fullmatch(name)
            if found and int(found[1]) > step:
                path = files.join(place, name)
                files.write_bytes(files.join(target, f"{folder}_{name}"), files.read_bytes(path))
                files.remove(path)


def _forget_evaluations(path: str, step: int) -> None:
    """Removes trainer.evaluate's results after `step`: those checkpoints will be others."""
    if not files.exists(path):
        return
    found = files.read_json(path)
    kept = {name: value for name, value in found["checkpoints"].items() if int(name) <= step}
    files.write_json(path, {**found, "checkpoints": kept})
