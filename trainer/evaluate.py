"""Evaluates checkpoints of a run on a whole split.

python -m trainer.evaluate --model_dir=DIR [--steps=all|latest|1000,2000]
"""

import os
import sys

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError, positive
from tasks.terminal.table import table

# By split, each metric's value; the first split is the one asked for, others are SPLIT/TASK.
Results = dict[str, dict[str, float]]


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
    add("--output", help="JSON file to write the metrics to; without it, MODEL_DIR/evaluation.json")
    add("--cache_dir", help="folder that holds the caches, if it has moved since training")
    add(
        "--batch_size",
        type=positive,
        help="rows per batch; without it, the run's own. It changes the metrics of models with "
        "Switch layers only",
    )
    arguments = parser.parse_args(argv)
    if arguments.output:
        _check_output(arguments.output)

    from trainer.config import fields, load_config

    config, origins = load_config(arguments.model_dir)
    overrides = {
        "model_dir": arguments.model_dir,
        "cache_dir": arguments.cache_dir,
        "evaluation.batch_size": arguments.batch_size,
    }
    for path, value in overrides.items():
        if value is not None:
            config = fields.replace(config, path, value)

    from trainer.checkpoint import Checkpoints, chosen_steps
    from trainer.engine.evaluator import Evaluator
    from trainer.engine.program import Program
    from trainer.reporting.metrics import EVALUATION_FILE
    from trainer.setup import on_this_machine, prepare

    run = prepare(on_this_machine(config), origins)
    checkpoints = Checkpoints(arguments.model_dir, writable=False)
    steps = chosen_steps(arguments.steps, checkpoints.steps(), arguments.model_dir)
    program = Program(run)
    evaluator = Evaluator(run, arguments.split, program.evaluation_step, program.mesh)
    results = {}
    for step in steps:
        results[step] = evaluator(checkpoints.restore(step, program.abstract_state()).params)
    checkpoints.close()
    files.write_json(
        arguments.output or files.join(arguments.model_dir, EVALUATION_FILE),
        {"checkpoints": {str(step): result for step, result in results.items()}},
    )
    print(_table(results))


def _check_output(output: str) -> None:
    """Makes the folder of a file, before hours are spent on what is to be written into it."""
    if files.is_remote(output):
        return
    path = os.path.abspath(files.local_path(output))
    if os.path.isdir(path):
        raise UserError(
            f"--output={output} is a folder: name a file, such as {output}/metrics.json"
        )
    files.make_folder(os.path.dirname(path))


def _table(results: dict[int, Results]) -> str:
    """Returns a table with a row per checkpoint and, for a mixture, per checkpoint and task."""
    rows = [
        {
            "step": step,
            "task": split.partition("/")[2] or "all",
            "loss": f"{result['loss']:.4f}",
            "perplexity": f"{result['perplexity']:.2f}",
            "accuracy": f"{result['accuracy']:.4f}",
            "below unigram": f"{result['unigram_entropy'] - result['loss']:.3f} nats",
            "bits/byte": f"{result['bits_per_byte']:.4f}" if "bits_per_byte" in result else "-",
        }
        for step, by_split in results.items()
        for split, result in by_split.items()
    ]
    # Columns that say the same in every row are left out.
    unused = {"task": "all", "bits/byte": "-"}
    header = [name for name in rows[0] if any(row[name] != unused.get(name) for row in rows)]
    return table(header, [[row[name] for name in header] for row in rows])


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
