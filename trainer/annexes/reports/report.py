"""Reports on runs: curves and a table of results.

    palimpsest report RUN [RUN …] [--output=FILE.html] [--rows=N] [--samples=N]

RUN is a model directory, local or remote. The page is one file that loads nothing else. It is made
from what the runs recorded; --rows and --samples also use each run's newest checkpoint.
"""

import dataclasses
import shlex
from typing import Any

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import at_least, field
from tasks.terminal.programs import program
from tasks.terminal.table import table

_PAGE = "report.html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    runs: tuple[str, ...] = field(
        (), "folder of a run, local or remote", positional=True, metavar="RUN"
    )
    model_dir: tuple[str, ...] = field((), "folder of a run, same as RUN", repeated=True)
    output: str | None = field(
        None,
        f"HTML file to write, local or remote; None: RUN/{_PAGE}, or {_PAGE} for several runs",
        metavar="FILE",
    )
    picture: str | None = field(None, "PNG of the loss curves to write as well", metavar="FILE")
    rows: int | None = field(
        None,
        "also show this many validation rows with the highest and with the lowest loss, and their "
        "documents",
        rule=at_least(1),
    )
    samples: int | None = field(
        None,
        "also let the model complete this many validation rows, or fill their spans",
        rule=at_least(1),
    )
    cache_dir: str | None = field(None, "folder of the tasks' caches, if they have moved")


def run(flags: Flags) -> None:
    """Writes the page and prints the table."""
    folders = [*flags.runs, *flags.model_dir]
    if not folders:
        raise UserError("name a run: the folder given to trainer.pretrain as --model_dir")
    if (flags.output or "").lower().endswith(".png"):
        raise UserError(f"--output={flags.output}: the report is HTML; --picture writes a PNG")

    from trainer.annexes.reports.page import page
    from trainer.reporting import history

    runs = history.load_all(folders)
    output = flags.output or (files.join(folders[0], _PAGE) if len(runs) == 1 else _PAGE)
    examined = {}
    if flags.rows or flags.samples:
        from trainer.annexes.reports.sections import examine

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
        print(_next(folders[0], runs[0].config))


def _text(runs: list[Any]) -> str:
    from trainer.annexes.reports.page import results

    columns = [dict(results(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    header = ["run", *(run.name for run in runs)]
    notes = [f"{run.name}: {missing}" for run in runs for missing in run.missing]
    return "\n".join([table(header, rows), *notes])


def _longer(config: Any) -> str:
    """Returns words about how to train for twice as many updates."""
    from trainer.optim import schedule

    steps = 2 * config.train_steps
    if schedule.rise(config.optimizer, config.train_steps, steps) is None:
        return f"run the training command again with --train_steps={steps}"
    cycle = config.optimizer.value("steps_per_cycle") + config.train_steps
    return (
        f"run the training command in another --model_dir with --train_steps={steps} and "
        f"--optimizer.steps_per_cycle={cycle}"
    )


def _next(folder: str, config: Any) -> str:
    run, logs = f"--model_dir={folder}", files.join(folder, "tensorboard")
    watch = "set --metrics.tensorboard=true"
    if files.exists(logs):
        watch = f"tensorboard {shlex.quote(f'--logdir={logs}')}  # pip install tensorboard"
    return f"""checkpoints  {folder}/checkpoint_STEP

Next:
  train longer          {_longer(config)}
  compare checkpoints   {program("trainer.evaluate")} {shlex.quote(run)} --steps=all
  watch the run         {watch}
  use your own text     {program("vocab.train")} --corpus='parquet:DATA/*.parquet' --output=DIR
  see all settings      {program("trainer.pretrain")} --help=all"""


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
