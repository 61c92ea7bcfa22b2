"""A comparison of vocabularies as plain data, as rows of tables, and as an HTML page."""

import dataclasses
from collections.abc import Iterator, Sequence

from tasks.pages import document as html_page
from vocab import scripts
from vocab.fit import Report

SUBJECT_HEADER = ("vocabulary", "kind", "ids", "sentinels", "sha256")
HEADER = (
    *("vocabulary", "tokens", "bytes a token", "tokens a word", "unknown", "byte fallback"),
    *("pieces used", "exact documents", "exact lines", "MB/s"),
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A vocabulary and its numbers of ids and sentinels."""

    name: str
    kind: str
    ids: int
    sentinels: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """The outcome of encoding and decoding texts.

    `documents` and `lines` are the shares restored exactly, of documents and of distinct lines
    encoded by themselves. `example` is (text, decoded text) around the first difference, or None.
    """

    documents: float
    lines: float
    example: tuple[str, str] | None


@dataclasses.dataclass(frozen=True)
class Measured:
    """A vocabulary on a corpus; `speed` of its library is in MB of text per second."""

    vocabulary: str
    corpus: str
    report: Report
    round_trip: RoundTrip
    speed: float

    def row(self) -> tuple[str, ...]:
        """Returns the cells under HEADER."""
        found, trip = self.report, self.round_trip
        return (
            self.vocabulary,
            f"{found.tokens:,}",
            f"{found.bytes_per_token:.3f}",
            f"{found.tokens_per_word:.3f}",
            f"{found.unknown_rate:.4%}",
            f"{found.byte_rate:.4%}",
            f"{found.used_share:.1%}",
            f"{trip.documents:.2%}",
            f"{trip.lines:.2%}",
            f"{self.speed:.2f}",
        )


@dataclasses.dataclass(frozen=True)
class OfCorpus:
    """All vocabularies on one corpus."""

    measured: Sequence[Measured]

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the rows under HEADER."""
        return [each.row() for each in self.measured]

    def by_script(self, least: float) -> tuple[list[str], list[list[str]]]:
        """Returns the header and the rows of bytes per token by script.

        Omits scripts with less than the share `least` of the words' bytes; the first row has the
        shares.
        """
        of_words = self.measured[0].report.by_script
        total = sum(tally.bytes for tally in of_words.values())
        shown = [
            script
            for script in scripts.SCRIPTS
            if script in of_words and of_words[script].bytes >= least * total
        ]
        shares = [f"{of_words[script].bytes / total:.1%}" for script in shown]
        rows = [
            [each.vocabulary]
            + [f"{each.report.by_script[script].bytes_per_token:.3f}" for script in shown]
            for each in self.measured
        ]
        return ["vocabulary", *shown], [["share of the words' bytes", *shares], *rows]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Vocabularies and their measurements, ordered by corpus."""

    subjects: Sequence[Subject]
    measured: Sequence[Measured]

    def by_corpus(self) -> dict[str, OfCorpus]:
        """Returns the measurements on each corpus."""
        names = dict.fromkeys(each.corpus for each in self.measured)
        return {
            name: OfCorpus([each for each in self.measured if each.corpus == name])
            for name in names
        }

    def examples(self) -> Iterator[tuple[str, str, tuple[str, str]]]:
        """Yields (vocabulary, corpus, (text, decoded)) of each first difference."""
        for subject in self.subjects:
            for each in self.measured:
                if each.vocabulary == subject.name and each.round_trip.example:
                    yield subject.name, each.corpus, each.round_trip.example
                    break


def subject_row(subject: Subject) -> tuple[str, ...]:
    """Returns the cells under SUBJECT_HEADER."""
    sizes = f"{subject.ids:,}", f"{subject.sentinels:,}"
    return (subject.name, subject.kind, *sizes, subject.sha256[:12])


def page(found: Comparison, least: float) -> str:
    """Returns the comparison as an HTML page; `least` is as in `OfCorpus.by_script`."""
    sections = [("Vocabularies", _subjects(found))]
    for corpus, measured in found.by_corpus().items():
        content = html_page.table("On the same text", HEADER, measured.rows())
        content += html_page.table("Bytes a token by script", *measured.by_script(least))
        sections.append((corpus, content))
    sections.append(("Round trips", _round_trips(found)))
    body, links = html_page.sections(sections)
    documents = sum(each.measured[0].report.documents for each in found.by_corpus().values())
    size = sum(each.measured[0].report.bytes for each in found.by_corpus().values())
    head = html_page.facts(
        [
            ("vocabularies", len(found.subjects)),
            ("corpora", len(found.by_corpus())),
            ("documents", f"{documents:,}"),
            ("text, MB", f"{size / 1e6:,.2f}"),
        ],
        "figures",
    )
    return html_page.document("Vocabularies compared", links, head, body)


def _subjects(found: Comparison) -> str:
    return html_page.table("What they are", SUBJECT_HEADER, map(subject_row, found.subjects))


def _round_trips(found: Comparison) -> str:
    rows = list(found.examples())
    if not rows:
        return "<p class=note>Every document comes back exactly.</p>"
    return html_page.table(
        "The first difference of each vocabulary",
        ("vocabulary", "corpus", "text", "comes back as"),
        [(name, corpus, repr(text), repr(back)) for name, corpus, (text, back) in rows],
    )
