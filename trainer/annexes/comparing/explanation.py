"""The documents and text behind one batch of a run, and the examples made from them."""

import numpy as np

from tasks.annexes.inspecting import show
from tasks.annexes.inspecting.trace import trace
from tasks.objectives.packing import InSlot
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import as_flag
from tasks.vocabulary import TokenIds
from trainer.annexes.comparing.document_steps import prepared
from trainer.checkpoints import metadata
from trainer.config.skips import described
from trainer.data.origins import Origins, Row
from trainer.reading import check_unchanged


class Explanation:
    """The batch of a run's step (from 1); `cache_dir` is its caches' folder, if moved.

    `skipped` says which batches `--data.skip` left out before; "" if none.
    """

    def __init__(self, model_dir: str, step: int, cache_dir: str | None = None):
        config, origins = metadata.load_config(model_dir)
        if not 1 <= step <= config.train_steps:
            raise UserError(
                f"--step={step}: the run in {model_dir} has steps 1 to {config.train_steps}"
            )
        if config.branch and step <= config.branch[1]:
            raise UserError(
                f"--step={step}: {model_dir} branched from {config.branch[0]} after update "
                f"{config.branch[1]}: give --model_dir={config.branch[0]}"
            )
        skips = config.data.skips
        read = skips.batch(step)
        self.skipped = ""
        if left_out := skips.up_to(read):
            self.skipped = (
                f"step {step:,} reads batch {read:,}; skipped by "
                f"--data.skip={as_flag(config.data.skip)}: {described(left_out)}"
            )
        _, self._data = prepared(config, origins, cache_dir)
        check_unchanged(model_dir, self._data, read)
        self.step = step
        # Update k uses batch k - 1.
        self._origins = Origins(self._data, step - 1)

    def __len__(self) -> int:
        return len(self._origins)

    def examples(self, row: int) -> int:
        """Returns the number of examples of a row; raises UserError if there is no such row."""
        return self._origins.examples(row)

    def examples_of(self, row: int | None) -> list[tuple[int, int]]:
        """Returns (row, number) of the examples of a row, or of all rows; see `examples`."""
        rows = range(len(self)) if row is None else [row]
        return [(each, number) for each in rows for number in range(self.examples(each))]

    @property
    def ids(self) -> TokenIds:
        """The vocabulary's ids."""
        return self._data.tasks[0].ids

    def row(self, row: int, example: int = 0) -> Row:
        """Returns the origin of an example; raises UserError if there is no such row."""
        return self._origins.row(row, example)

    def sample(self, row: int, example: int = 0) -> show.Sample:
        """Returns the text of an example and the features made from it, for display."""
        found = self.row(row, example)
        source, task, lineage = self._origins.source(row, example)
        tokens_WN, lengths_W = source.maker.windows.read(np.array([found.window]))
        tokens_N = tokens_WN[0, : int(lengths_W[0])]
        objective, lengths = task.task.objective, source.maker.example_lengths
        if found.slot:
            objective = InSlot(objective, found.slot)
        made = trace(objective, tokens_N, found.key, lengths, task.ids)
        facts = (
            ("task", found.task),
            ("objective", objective.describe(found.key)),
            ("window", f"{found.window:,}, epoch {found.epoch:,}"),
            *show.features(made),
            ("cache", task.cache),
            *([("skipped", self.skipped)] if self.skipped else []),
        )
        return show.Sample(
            f"Step {self.step:,}, row {row:,}{self._number(example)}",
            facts,
            found.places,
            found.parts,
            str(task.manifest.plan.corpus["spec"]),
            tokens_N,
            made,
            lengths,
            lineage.unit,
        )

    def _number(self, example: int) -> str:
        return f", example {example + 1}" if self._data.sources[0].packed else ""

    def line(self, row: int, example: int = 0) -> str:
        """Returns a line that names the documents in an example."""
        found = self.row(row, example)
        documents = ", ".join(
            f"{part.id} [{part.first}:{part.first + part.tokens}]" for part in found.parts
        )
        return show.printable(
            f"row {row}{self._number(example)}: {found.task}, epoch {found.epoch}, "
            f"window {found.window}: {documents}"
        )
