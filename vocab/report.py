"""Measures how well a vocabulary fits one or more corpora.

    python -m vocab.report --vocabulary=DIR --corpus=SPEC [--corpus=SPEC]

Several corpora are shown side by side, and each is broken down by script (`vocab.fit`).
"""

from tasks import registry, vocabulary
from tasks.reading import sources
from tasks.terminal import command_line
from vocab import fit


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = command_line.Parser(prog="python -m vocab.report", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--vocabulary",
        required=True,
        metavar="PATH",
        help=f"vocabulary to measure: {vocabulary.FORMS}",
    )
    add(
        "--corpus",
        required=True,
        action="append",
        metavar="SPEC",
        help=f"corpus to measure on; may be repeated to compare: {sources.FORMS}",
    )
    add(
        "--extra_ids",
        type=int,
        default=0,
        help="number of sentinels to add to a model that has none",
    )
    add("--task_module", metavar="MODULE", help="Python module that registers vocabularies")
    flags = parser.parse_args(argv)
    if flags.task_module:
        registry.load(flags.task_module)
    loaded = vocabulary.load(flags.vocabulary, flags.extra_ids)
    corpora = [sources.resolve(sources.parse(spec)) for spec in flags.corpus]
    for note in (note for corpus in corpora for note in corpus.notes):
        print(note)
    specs = ", ".join(str(corpus.spec) for corpus in corpora)
    print(f"{flags.vocabulary} on {specs} (sha256 {loaded.record.sha256[:12]})")
    reports = [fit.measure(loaded, corpus) for corpus in corpora]
    names = [str(corpus.spec) if len(corpora) > 1 else "" for corpus in corpora]
    print(fit.table(list(zip(names, reports, strict=True))))


if __name__ == "__main__":
    command_line.run(main)
