"""Describes a cache on one HTML page.

    palimpsest cache report --cache=DIR [--output=FILE.html]

The numbers of documents, tokens, rows and omitted documents cover the whole cache. Whatever
requires reading rows (lengths, pieces, duplicates, examples) comes from at most --sample_shards
shards of each split, as the page says. Memory grows only with the sample, by 16 bytes per document.
The page needs no network; without JavaScript it lacks only its chart.
"""

import dataclasses

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    cache: str = field(REQUIRED, "folder of the cache: CACHE_DIR/TASK", metavar="DIR", bare=True)
    output: str = field("report.html", "HTML file to write", metavar="FILE", aliases=("html",))
    task_module: str | None = field(None, "Python module that registers the cache's vocabulary")
    sample_shards: int = field(
        32, "maximum number of shards to read from each split", rule=at_least(1)
    )


def run(flags: Flags) -> None:
    """Writes the page."""
    from pipeline.annexes.report.findings import study
    from pipeline.annexes.report.page import page
    from tasks import registry, vocabulary
    from tasks.cache.manifest import CacheManifest
    from tasks.storage import files

    if flags.task_module:
        registry.load(flags.task_module)
    manifest = CacheManifest.load(flags.cache)
    if manifest.plan.adopted:
        raise UserError(
            f"{flags.cache} was adopted from {manifest.plan.adopted.program} and has no table of "
            "documents: use pipeline.verify to count its rows, or palimpsest inspect to see them"
        )
    loaded = vocabulary.of_cache(flags.cache, manifest.plan.vocabulary)
    found = study(flags.cache, manifest, loaded, flags.sample_shards)
    files.write_bytes(flags.output, page(flags.cache, manifest, loaded, found).encode())
    print(f"{flags.output}: read {found.shards[0]:,} of {found.shards[1]:,} shards")


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
