"""Compares vocabularies of any kind on the same text.

    palimpsest vocab compare --vocabulary=DIR --vocabulary=tokenizer.json --vocabulary=bytes \\
        --corpus='json:data/{language}/*.jsonl' --output=page.html

Each corpus is sampled once. The report shows, by corpus and by the script of words, tokens and
bytes per token; also unknown and byte-fallback tokens, the share of texts that decode exactly, and
the library's speed on one thread. A word is encoded, and its bytes counted, with the space before.
"""

import dataclasses
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks import vocabulary
from tasks.annexes.pages import document as html_page
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, field
from tasks.terminal.table import table
from tasks.vocabularies import byte_level, tokenizer_json
from vocab import fit, protos, weighting

# Tables leave out scripts with less than this share of a corpus's words, by bytes.
_LEAST_SHARE = 0.001
_CONTEXT = 24  # characters shown on either side of a difference
# How output files begin, by flag.
_BEGINS = {"json": rb'\{\s*"measured": ', "output": rb"<!DOCTYPE html>"}
_SUBJECT_HEADER = ("vocabulary", "kind", "ids", "sentinels", "sha256")
_HEADER = (
    *("vocabulary", "tokens", "bytes a token", "tokens a word", "unknown", "byte fallback"),
    *("pieces used", "exact documents", "exact lines", "MB/s"),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a vocabulary on a corpus."""

    vocabulary: str
    report: fit.Report
    # documents, lines: shares of documents, and of distinct lines encoded separately, that
    # encoding and decoding restore exactly.
    documents: float
    lines: float
    example: tuple[str, str] | None  # (text, decoded text) around the first difference, or None
    speed: float  # the library's, in MB of text per second

    def row(self) -> tuple[str, ...]:
        found = self.report
        rates = (f"{found.unknown_rate:.4%}", f"{found.byte_rate:.4%}", f"{found.used_share:.1%}")
        return (
            *(self.vocabulary, f"{found.tokens:,}"),
            *(f"{found.bytes_per_token:.3f}", f"{found.tokens_per_word:.3f}", *rates),
            *(f"{self.documents:.2%}", f"{self.lines:.2%}", f"{self.speed:.2f}"),
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Vocabularies, each with its cells under _SUBJECT_HEADER, and measurements by corpus."""

    subjects: Sequence[Sequence[Any]]
    measured: Mapping[str, Sequence[Measured]]

    def examples(self) -> Iterator[tuple[str, str, tuple[str, str]]]:
        """Yields (vocabulary, corpus, (text, decoded)) of each vocabulary's first difference."""
        for name, *_ in self.subjects:
            for corpus, of_corpus in self.measured.items():
                found = next(each.example for each in of_corpus if each.vocabulary == name)
                if found:
                    yield name, corpus, found
                    break

    def subject_rows(self) -> list[tuple[str, ...]]:
        return [
            (name, kind, f"{ids:,}", f"{sentinels:,}", sha256[:12])
            for name, kind, ids, sentinels, sha256 in self.subjects
        ]

    def as_json(self) -> dict[str, Any]:
        names = ("name", *_SUBJECT_HEADER[1:])
        return {
            "vocabularies": [dict(zip(names, subject, strict=True)) for subject in self.subjects],
            "measured": [
                {
                    "vocabulary": each.vocabulary,
                    "corpus": corpus,
                    **each.report.as_dict(),
                    "exact_documents": each.documents,
                    "exact_lines": each.lines,
                    "difference": each.example,
                    "megabytes_per_second": round(each.speed, 3),
                }
                for corpus, of_corpus in self.measured.items()
                for each in of_corpus
            ],
        }


def compare(
    loaded: Mapping[str, vocabulary.Vocabulary], corpora: Mapping[str, sources.Corpus]
) -> Comparison:
    """Measures each vocabulary on the sample of each corpus."""
    subjects = [
        (name, _kind(each), each.size, each.record.sentinels, each.record.sha256)
        for name, each in loaded.items()
    ]
    measured: dict[str, list[Measured]] = {}
    with progress.shown("comparing", len(loaded) * len(corpora)) as bar:
        for corpus, resolved in corpora.items():
            split, texts = fit.sample(resolved)
            of_corpus = measured.setdefault(corpus, [])
            for name, each in loaded.items():
                of_corpus.append(_measured(name, each, split, texts))
                bar.update(sum(map(len, measured.values())))
    return Comparison(subjects, measured)


def _measured(name: str, loaded: vocabulary.Vocabulary, split: str, texts: list[str]) -> Measured:
    begun = time.perf_counter()
    encoded = loaded.encode(texts)
    seconds = time.perf_counter() - begun
    found = fit.of_texts(loaded, split, texts, space=" ")
    decoded = [loaded.codec.decode(ids.tolist()) for ids in encoded]
    lines = [line for line in dict.fromkeys("\n".join(texts).split("\n")) if line.strip()]
    exact_lines = sum(
        loaded.codec.decode(ids.tolist()) == line
        for line, ids in zip(lines, loaded.encode(lines), strict=True)
    )
    exact = [text == back for text, back in zip(texts, decoded, strict=True)]
    wrong = exact.index(False) if not all(exact) else None
    return Measured(
        name,
        found,
        documents=sum(exact) / len(texts),
        lines=exact_lines / max(1, len(lines)),
        example=None if wrong is None else difference(texts[wrong], decoded[wrong]),
        speed=found.bytes / 1e6 / max(seconds, 1e-9),
    )


def difference(text: str, back: str) -> tuple[str, str]:
    """Returns the context of the first difference between a text and its round trip, in both."""
    pairs = enumerate(zip(text, back, strict=False))
    shorter = min(len(text), len(back))
    at = next((place for place, (a, b) in pairs if a != b), shorter)
    begin = max(0, at - _CONTEXT)
    return text[begin : at + _CONTEXT], back[begin : at + _CONTEXT]


def _kind(loaded: vocabulary.Vocabulary) -> str:
    if loaded.model == byte_level.byte_vocabulary():
        return "bytes"
    if loaded.is_registered:
        return "class"
    if not loaded.is_sentencepiece:
        value = tokenizer_json.parsed(loaded.model, loaded.name)
        level = "byte-level " if tokenizer_json.is_byte_level(value) else ""
        return f"{level}{value['model']['type']}"
    spec = protos.proto_of(loaded.model).trainer_spec
    return f"SentencePiece {spec.ModelType.Name(spec.model_type).lower()}"


def _by_script(measured: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Returns a table of bytes per token by script: its header, and rows, the first with shares."""
    of_words = measured[0].report.by_script
    total = sum(tally.bytes for tally in of_words.values())
    shown = [
        script
        for script in fit.SCRIPTS
        if script in of_words and of_words[script].bytes >= _LEAST_SHARE * total
    ]
    shares = [f"{of_words[script].bytes / total:.1%}" for script in shown]
    rows = [
        [each.vocabulary]
        + [f"{each.report.by_script[script].bytes_per_token:.3f}" for script in shown]
        for each in measured
    ]
    return ["vocabulary", *shown], [["share of the words' bytes", *shares], *rows]


def text_of(found: Comparison) -> str:
    """Returns the comparison as tables for a terminal."""
    parts = [table(_SUBJECT_HEADER, found.subject_rows())]
    for corpus, of_corpus in found.measured.items():
        parts.append(f"{corpus}\n{table(_HEADER, [each.row() for each in of_corpus])}")
        parts.append(f"bytes a token by script\n{table(*_by_script(of_corpus))}")
    for subject, corpus, (text, back) in found.examples():
        parts.append(f"{subject} on {corpus}: {text!r} comes back as {back!r}")
    return "\n\n".join(parts)


def page(found: Comparison) -> str:
    """Returns the comparison as an HTML page."""
    subjects = html_page.table("What they are", _SUBJECT_HEADER, found.subject_rows())
    sections = [("Vocabularies", subjects)]
    for corpus, of_corpus in found.measured.items():
        rows = [each.row() for each in of_corpus]
        content = html_page.table("On the same text", _HEADER, rows)
        content += html_page.table("Bytes a token by script", *_by_script(of_corpus))
        sections.append((corpus, content))
    trips = "<p class=note>Every document comes back exactly.</p>"
    if rows := [(*names, *map(repr, pair)) for *names, pair in found.examples()]:
        header = ("vocabulary", "corpus", "text", "comes back as")
        trips = html_page.table("The first difference of each vocabulary", header, rows)
    body, links = html_page.sections([*sections, ("Round trips", trips)])
    firsts = [of_corpus[0].report for of_corpus in found.measured.values()]
    facts = [
        ("vocabularies", len(found.subjects)),
        ("corpora", len(found.measured)),
        ("documents", f"{sum(first.documents for first in firsts):,}"),
        ("text, MB", f"{sum(first.bytes for first in firsts) / 1e6:,.2f}"),
    ]
    head = html_page.facts(facts, "figures")
    return html_page.document("Vocabularies compared", links, head, body)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(weighting.CorpusFlags):
    """Flags of the command."""

    vocabulary: tuple[str, ...] = field(
        REQUIRED,
        f"vocabulary to compare; repeat the flag for each one: {vocabulary.FORMS}",
        metavar="PATH",
        repeated=True,
    )
    output: str | None = field(None, "HTML page to write", metavar="FILE")
    json: str | None = field(None, "JSON file to which all numbers are written", metavar="FILE")


def _check_file(flag: str, path: str | None) -> None:
    """Checks that a file can be written before anything is measured."""
    if path is None:
        return
    if not files.is_remote(path):
        place = files.local_path(path)
        if os.path.isdir(place):
            raise UserError(f"--{flag}={path} is a folder: name a file")
        if not os.path.isdir(os.path.dirname(place) or "."):
            raise UserError(f"--{flag}={path}: there is no folder {os.path.dirname(path)}")
    # The file may be the corpus itself.
    if files.exists(path) and not re.match(_BEGINS[flag], files.read_bytes(path)):
        raise UserError(f"--{flag}={path} holds something else: name another file")


def run(flags: Flags) -> None:
    """Prints and writes the comparison."""
    specs = flags.specs()
    for path in flags.vocabulary:
        if flags.vocabulary.count(path) > 1:
            raise UserError(f"--vocabulary={path} is given twice: leave one out")
    for flag in ("json", "output"):
        _check_file(flag, getattr(flags, flag))
    if flags.json and flags.json == flags.output:
        raise UserError(f"--json={flags.json} is also --output: name a different file")
    loaded = {path: vocabulary.load(path) for path in flags.vocabulary}
    parts = weighting.resolved(specs)
    corpora = {name or str(corpus.spec): corpus for name, corpus in parts.items()}
    found = compare(loaded, corpora)
    print(text_of(found))
    if flags.json:
        files.write_json(flags.json, found.as_json())
    if flags.output:
        files.write_bytes(flags.output, page(found).encode())
        print(f"wrote {flags.output}")


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
