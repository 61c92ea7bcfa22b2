"""Says what one batch of a run was made of: documents, text, and what the objective made of them.

python -m trainer.explain --model_dir=DIR --step=41217 [--row=3] [--html=FILE]

The run's config.json and the index of its caches are enough: no checkpoint, no device.
"""

import dataclasses
import sys

import numpy as np

from tasks.cache.lineage import Lineage, Part
from tasks.cache.windows import Place
from tasks.inspection import show
from tasks.inspection.trace import trace
from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError
from tasks.vocabulary import TokenIds


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a row of a batch comes from, and whose tokens it has; `key` is that of its noise."""

    task: str
    epoch: int
    window: int
    key: np.uint64
    place: Place
    parts: tuple[Part, ...]


class Explanation:
    """Step `step` of the run in `model_dir`, counted as in metrics.jsonl: 1 is the first update.

    Args:
      model_dir: of a run, finished or not.
      step: 1 to the run's last.
      cache_dir: where the caches lie now, if they were moved.

    Raises:
      UserError: there is no such run, step or cache.
    """

    def __init__(self, model_dir: str, step: int, cache_dir: str | None = None):
        from trainer.config import fields, load_config
        from trainer.data.cached import CachedData
        from trainer.setup import prepare

        config, origins = load_config(model_dir)
        if cache_dir:
            config = fields.replace(config, "cache_dir", cache_dir)
        if not 1 <= step <= config.train_steps:
            raise UserError(
                f"--step={step}: the run in {model_dir} has steps 1 to {config.train_steps}"
            )
        run = prepare(config, origins)
        if not isinstance(run.data, CachedData):
            raise UserError(f"task {config.task} is read through seqio, which keeps no lineage")
        self.step = step
        self._lengths, self._data = run.lengths, run.data
        # Update k is made from batch k - 1.
        self._places = self._data.batches().places(step - 1)
        self._lineages: dict[int, Lineage] = {}

    def __len__(self) -> int:
        return len(self._places.windows)

    @property
    def ids(self) -> TokenIds:
        """The vocabulary."""
        return self._data.tasks[0].ids

    def row(self, row: int) -> Row:
        """Returns where a row comes from.

        Raises:
          UserError: the batch has no such row.
        """
        if not 0 <= row < len(self):
            raise UserError(f"--row={row}: the batch has rows 0 to {len(self) - 1}")
        places = self._places
        number, epoch, window = (
            int(values[row]) for values in (places.sources, places.epochs, places.windows)
        )
        source, task = self._data.sources[number], self._data.tasks[number]
        if number not in self._lineages:
            self._lineages[number] = Lineage(task.cache, task.manifest, "train")
        key = source.keys(np.array([epoch]), np.array([window]))[0]
        place = source.maker.windows.where(window)
        return Row(source.task, epoch, window, key, place, self._lineages[number].parts(place))

    def sample(self, row: int) -> show.Sample:
        """Returns a row's text and what it became, to be shown."""
        found = self.row(row)
        number = int(self._places.sources[row])
        source, task = self._data.sources[number], self._data.tasks[number]
        tokens_WN, lengths_W = source.maker.windows.read(np.array([found.window]))
        tokens_N = tokens_WN[0, : int(lengths_W[0])]
        made = trace(task.task.objective, tokens_N, found.key, self._lengths, task.ids)
        facts = (
            ("task", found.task),
            ("objective", task.task.objective.describe(found.key)),
            ("window", f"{found.window:,}, epoch {found.epoch:,}"),
            *show.features(made),
            ("cache", task.cache),
        )
        return show.Sample(
            f"Step {self.step:,}, row {row:,}",
            facts,
            found.place,
            found.parts,
            str(task.manifest.plan.corpus["spec"]),
            tokens_N,
            made,
            self._lengths,
        )

    def line(self, row: int) -> str:
        """Returns a row's documents in a line."""
        found = self.row(row)
        documents = ", ".join(
            f"{part.id} [{part.first}:{part.first + part.tokens}]" for part in found.parts
        )
        return show.printable(
            f"row {row}: {found.task}, epoch {found.epoch}, window {found.window}: {documents}"
        )


def main(argv: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m trainer.explain", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model_dir", required=True, help="where trainer.pretrain wrote")
    add("--step", type=int, required=True, help="an update, as metrics.jsonl counts them")
    add("--row", type=int, help="a row of its batch (default: a line for each)")
    add("--cache_dir", help="where the caches lie now (default: where they were)")
    add("--html", help="write this page instead")
    flags = parser.parse_args(argv)

    explanation = Explanation(flags.model_dir, flags.step, flags.cache_dir)
    if flags.row is None and not flags.html:
        for row in range(len(explanation)):
            print(explanation.line(row))
        return
    rows = range(len(explanation)) if flags.row is None else [flags.row]
    samples = [explanation.sample(row) for row in rows]
    if not flags.html:
        show.print_samples(samples, explanation.ids)
        return
    title = f"{flags.model_dir}: step {flags.step:,}"
    files.write_bytes(flags.html, show.page(title, samples, explanation.ids).encode())
    print(f"{flags.html}: {len(samples)} rows")


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
