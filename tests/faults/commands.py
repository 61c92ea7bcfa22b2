"""The builds and runs that are broken, and what they are doing, judged by their files."""

import argparse
import pathlib
import signal

from tasks.cache.manifest import MANIFEST, PLAN
from tasks.storage import files
from tasks.terminal.command_line import EXIT_INTERRUPTED
from tests.faults.command import DEADLINE_SECONDS, Command
from tests.faults.comparing import metrics_of

# Exit code after SIGTERM, as in `trainer.engine.stopping`, which imports JAX.
EXIT_PREEMPTED = 75
# Settings of the runs besides the command's own flags: short rows, dropout, every kind of output.
_SETTINGS = (
    "--batch_size=4",
    "--lengths.inputs=64",
    "--lengths.targets=18",
    "--model.dropout_rate=0.1",
    "--metrics.every_steps=1",
    "--checkpoint.best_metric=loss",
)


class Build(Command):
    """A build of the cache in the folder `cache`, by `pipeline.build` with `flags`."""

    def __init__(self, cache: pathlib.Path, log: pathlib.Path, *flags: str):
        self.cache = cache
        super().__init__("a build", ("pipeline.build", f"--cache_dir={cache.parent}", *flags), log)

    @property
    def planned(self) -> bool:
        return (self.cache / PLAN).exists()

    def shards(self, split: str = "*") -> int:
        return len(list(self.cache.glob(f"{split}.receipt-*")))

    def _doing(self) -> str:
        if (self.cache / MANIFEST).exists():
            return "ending"
        return "writing shards" if any(self.cache.glob(f"{files.PARTIAL}*")) else "starting"


class Run(Command):
    """A run in a model directory."""

    exit_codes = {
        signal.SIGINT: (EXIT_INTERRUPTED,),
        # SIGTERM before the first update ends a run like any program.
        signal.SIGTERM: (EXIT_PREEMPTED, -signal.SIGTERM),
    }
    end_seconds = DEADLINE_SECONDS  # it saves first
    tracebacks = ("Traceback (most recent call last)",)

    def __init__(self, flags: argparse.Namespace, cache_dir, folder: pathlib.Path, settings):
        self.folder = folder
        module = [
            *("trainer.pretrain", f"--preset={flags.preset}", f"--task={flags.task}"),
            *(f"--cache_dir={cache_dir}", f"--train_steps={flags.steps}"),
            *(f"--model_dir={folder}", *_SETTINGS),
            f"--checkpoint.every_steps={max(1, flags.steps // 12)}",
            f"--evaluation.every_steps={max(1, flags.steps // 8)}",
            *settings,
        ]
        super().__init__("a run", module, folder.with_suffix(".log"))
        self._leftovers: set[pathlib.Path] = set()
        every = [text for text in module if text.startswith("--evaluation.every_steps=")]
        self._evaluation_steps = int(every[-1].partition("=")[2])

    def start(self, *more: str, **options) -> Command:
        self._leftovers = set(self._partial_checkpoints())
        return super().start(*more, **options)

    def lines(self) -> list[dict]:
        return metrics_of(self.folder)

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def checkpoint(self) -> int:
        names = [path.name.removeprefix("checkpoint_") for path in self.folder.glob("checkpoint_*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def is_training(self) -> bool:
        return "this run" in self.output()

    def is_saving(self) -> bool:
        return not self._leftovers.issuperset(self._partial_checkpoints())

    def _partial_checkpoints(self) -> list[pathlib.Path]:
        return [*self.folder.glob("checkpoint_*tmp*")]

    def is_evaluating(self) -> bool:
        """Returns whether the last step has training metrics but not yet its due evaluation."""
        every, last = self._evaluation_steps, next(reversed(self.lines()), None)
        return bool(last and every and last["split"] == "train" and last["step"] % every == 0)

    def waits_for(self) -> str:
        """Returns what the run waits for, where it follows a build; "" if it does not wait."""
        begins, ends = "waiting for ", "went on after "
        lines = self.output().splitlines()
        last = next((line for line in reversed(lines) if line.startswith((begins, ends))), ends)
        return "" if last.startswith(ends) else last.removeprefix(begins).partition(" of ")[0]

    def _doing(self) -> str:
        if what := self.waits_for():
            return f"waiting for {what}"
        if not self.is_training():
            return "starting"
        if self.is_saving():
            return "writing a checkpoint"
        if self.is_evaluating():
            return "evaluating"
        steps = [line["step"] for line in self.lines()]
        before = self.checkpoint()
        return "making updates" if steps and steps[-1] > before else "before its first update"
