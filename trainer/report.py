"""Reports on runs: an HTML page of curves, configuration and examples, and a table of results.

    python -m trainer.report RUN [RUN …] [--output=FILE.html] [--rows=N] [--samples=N]

RUN is a model directory, local or remote. The page is one file that loads nothing. It is made from
what the runs recorded; --rows and --samples compute with the newest checkpoint of each run.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError, positive
from tasks.terminal.table import table

_PAGE = "report.html"


def main(argv: list[str]) -> None:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    folders = [*flags.runs, *flags.model_dir]
    if not folders:
        raise UserError("name a run: the folder given to trainer.pretrain as --model_dir")
    if (flags.output or "").lower().endswith(".png"):
        raise UserError(f"--output={flags.output}: the report is HTML; --picture writes a PNG")

    from trainer.reporting import history
    from trainer.reporting.page import page

    runs = history.load_all(folders)
    output = flags.output or (files.join(folders[0], _PAGE) if len(runs) == 1 else _PAGE)
    examined = {}
    if flags.rows or flags.samples:
        from trainer.trained.report_sections import examine

        examined = examine(runs, flags.rows, flags.samples, flags.cache_dir)
    files.write_bytes(output, page(runs, examined).encode())
    if flags.picture:
        from trainer.reporting.drawing import draw_losses

        draw_losses(runs, flags.picture)
    print(_text(runs))
    print(f"\npage         {output}")
    if flags.picture:
        print(f"loss curve   {flags.picture}")
    if len(runs) == 1:
        print(_next(folders[0], runs[0].config.train_steps))


def _parser() -> Parser:
    parser = Parser(prog="python -m trainer.report", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="folder of a run, local or remote")
    add("--model_dir", action="append", default=[], help="folder of a run, as RUN")
    add(
        "--output",
        help=f"HTML file to write, local or remote; RUN/{_PAGE} if left out, {_PAGE} for several",
    )
    add("--picture", help="PNG of the loss curves to write as well")
    add(
        "--rows",
        type=positive,
        help="also show so many rows of validation with the highest and with the lowest loss, and "
        "their documents",
    )
    add(
        "--samples",
        type=positive,
        help="also let the model complete so many rows of validation, spans filled in",
    )
    add("--cache_dir", help="folder of caches by task, if they were moved after training")
    return parser


def _text(runs: list[Any]) -> str:
    """Returns a table of the newest results, a column for each run."""
    from trainer.reporting.page import results

    columns = [dict(results(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    header = ["run", *(run.name for run in runs)]
    notes = [f"{run.name}: {missing}" for run in runs for missing in run.missing]
    return "\n".join([table(header, rows), *notes])


def _next(folder: str, steps: int) -> str:
    run = f"--model_dir={folder}"
    logs = files.join(folder, "tensorboard")
    watch = (
        f"tensorboard {shlex.quote(f'--logdir={logs}')}"
        if files.exists(logs)
        else ("set --metrics.tensorboard=true")
    )
    return f"""checkpoints  {folder}/checkpoint_STEP

Next:
  train longer          run the same command of trainer.pretrain with --train_steps={2 * steps}
  compare checkpoints   python -m trainer.evaluate {shlex.quote(run)} --steps=all
  watch the run         {watch}
  use your own text     python -m vocab.train --corpus='parquet:DATA/*.parquet' --output=DIR
  see all settings      python -m trainer.pretrain --help"""


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
