"""A build that is killed and restarted while a run follows it, and how two caches differ."""

import argparse
import pathlib
import signal
import sys

from tasks.cache.manifest import MANIFEST, PLAN
from tasks.storage import files
from tasks.terminal.command_line import EXIT_INTERRUPTED
from trainer.faults.command import Command


class Build(Command):
    """A build of a cache, in processes of its own, by the same command each time.

    Args:
      flags: the task, the corpus, the vocabulary and shard_bytes.
      cache_dir: folder of the cache of the task.
      settings: further flags of pipeline.build.
    """

    exit_codes = {
        # Python's own code if Ctrl-C arrives when it shuts down.
        signal.SIGINT: (EXIT_INTERRUPTED, -signal.SIGINT),
        # A build handles no SIGTERM: it ends as by SIGKILL.
        signal.SIGTERM: (-signal.SIGTERM,),
    }

    def __init__(self, flags: argparse.Namespace, cache_dir: pathlib.Path, settings: list[str]):
        self.cache = cache_dir / flags.task
        command = [
            *(sys.executable, "-m", "pipeline.build", f"--task={flags.task}"),
            *(f"--corpus={flags.corpus}", f"--vocabulary={flags.vocabulary}"),
            *(f"--shard_bytes={flags.shard_bytes}", f"--cache_dir={cache_dir}", *settings),
        ]
        super().__init__("a build", command, cache_dir.parent / "build.log")

    @property
    def planned(self) -> bool:
        """True if the cache has a plan."""
        return (self.cache / PLAN).exists()

    def shards(self, split: str = "*") -> int:
        """Returns how many shards are finished, of a split or of all."""
        return len(list(self.cache.glob(f"{split}.receipt-*")))

    def _doing(self) -> str:
        """Returns what the build is doing, judged by the files of the cache."""
        if (self.cache / MANIFEST).exists():
            return "ending"
        return "writing shards" if any(self.cache.glob(f"{files.PARTIAL}*")) else "starting"


def cache_differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Returns the differences between two caches: files whose SHA-256 differs, or in one only."""
    found = [
        {path.name: files.sha256(str(path)) for path in folder.iterdir() if path.is_file()}
        for folder in (one, other)
    ]
    return [
        f"file {name}"
        for name in sorted({*found[0], *found[1]})
        if found[0].get(name) != found[1].get(name)
    ]
