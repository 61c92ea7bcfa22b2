"""Measures how well a vocabulary fits a corpus.

    palimpsest vocab report --vocabulary=DIR --corpus=SPEC [--corpus=SPEC]

Several corpora are shown side by side, and each is broken down by script (`vocab.fit`).
"""

import dataclasses

from tasks import registry, vocabulary
from tasks.reading import sources
from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, field
from vocab import fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    vocabulary: str = field(REQUIRED, f"vocabulary to measure: {vocabulary.FORMS}", metavar="PATH")
    corpus: tuple[str, ...] = field(
        REQUIRED,
        f"corpus to measure on; repeat the flag to compare several: {sources.forms()}",
        metavar="SPEC",
        repeated=True,
    )
    extra_ids: int = field(0, "number of sentinels to add to a model that has none")
    task_module: str | None = field(
        None, "Python module that registers vocabularies", metavar="MODULE"
    )


def run(flags: Flags) -> None:
    """Prints the report."""
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


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
