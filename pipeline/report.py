"""Describes a cache on one HTML page: `python -m pipeline.report --cache=DIR`.

The numbers of documents, tokens, rows and omitted documents are those of the whole cache. Whatever
requires reading rows (lengths, pieces, duplicates, examples) comes from at most --sample_shards
shards of each split, as the page says. Memory grows with the sample alone, by 16 bytes per
document. The page needs no network; without JavaScript it lacks only its chart.
"""

from tasks.cache.manifest import CacheManifest
from tasks.storage import files
from tasks.terminal.command_line import Parser, UserError, positive, run


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m pipeline.report", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cache", required=True, help="folder of the cache: CACHE_DIR/TASK")
    add("--output", "--html", default="report.html", help="HTML file to write")
    add("--sample_shards", type=positive, default=32, help="most shards of each split to read")
    flags = parser.parse_args(argv)

    from pipeline.reporting.findings import study
    from pipeline.reporting.page import page
    from tasks import vocabulary

    manifest = CacheManifest.load(flags.cache)
    if manifest.plan.adopted:
        raise UserError(
            f"{flags.cache} was adopted from {manifest.plan.adopted.program} and has no table of "
            "documents to report on: pipeline.verify counts its rows, pipeline.inspect shows them"
        )
    loaded = vocabulary.of_cache(flags.cache, manifest.plan.vocabulary)
    found = study(flags.cache, manifest, loaded, flags.sample_shards)
    files.write_bytes(flags.output, page(flags.cache, manifest, loaded, found).encode())
    print(f"{flags.output}: read {found.shards[0]:,} of {found.shards[1]:,} shards")


if __name__ == "__main__":
    run(main)
