"""Counts the documents of a cache."""

import dataclasses

from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of the command."""

    cache: str = field(REQUIRED, "folder of a task's cache")


def run(flags: Flags) -> None:
    from tasks.cache.manifest import CacheManifest

    print(CacheManifest.load(flags.cache).total("train", "documents"))


main = Command(Flags, run)
