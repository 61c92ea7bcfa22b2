"""Evaluates checkpoints of a run on a whole split.

    python -m trainer.evaluate --model_dir=DIR [--steps=all|latest|1000,2000] [--task=TASK] \\
        [--split=SPLIT] [--metrics=NAME,NAME] [--plot=FILE.png]

The metrics are added to MODEL_DIR/evaluation.json unless --output names a file.
"""

import os

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from trainer.config.evaluation import EvaluateFlags


def evaluated(flags: EvaluateFlags) -> dict[int, dict[str, dict[str, float]]]:
    """Evaluates, and writes and prints the metrics; returns step -> split -> metric -> value."""
    for flag in ("output", "plot"):
        if path := getattr(flags, flag):
            _check_output(flag, path)

    from trainer.engine import processes

    with processes.joined(flags.processes):
        for name in annexes.entries("flags.evaluate"):
            if getattr(getattr(flags, name, None), name, None):
                found: dict[int, dict[str, dict[str, float]]] = annexes.get("evaluate", name)(flags)
                return found
        from trainer.evaluating import whole_splits

        return whole_splits.evaluate(flags)


def run(flags: EvaluateFlags) -> None:
    evaluated(flags)


def _check_output(flag: str, output: str) -> None:
    """Makes the folder of an output file, so that hours of evaluation cannot fail on it."""
    if files.is_remote(output):
        return
    path = os.path.abspath(files.local_path(output))
    if os.path.isdir(path):
        example = f"{output}/metrics.{'png' if flag == 'plot' else 'json'}"
        raise UserError(f"--{flag}={output} is a folder: name a file, such as {example}")
    files.make_folder(os.path.dirname(path))


main = Command(EvaluateFlags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
