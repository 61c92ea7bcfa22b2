"""Measures how well a vocabulary fits text: samples a corpus, counts, and makes tables.

White space separates words; a word belongs to the script of its first letter.
"""

import dataclasses
import functools
import hashlib
import itertools
import textwrap
import unicodedata
from collections import Counter, defaultdict
from typing import Any

from tasks import vocabulary
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table as aligned
from tasks.vocabulary import Vocabulary
from vocab.word_splitter import SPACE

_SAMPLE_BYTES = 2_000_000

DIGITS = "digits"
SIGNS = "punctuation"
OTHER = "other"
# The first word of a character's Unicode name gives its script. Source: UnicodeData.txt; Unicode
# Standard Annex 24 assigns letters the same scripts.
_BY_NAME = {
    "LATIN": "Latin",
    "FULLWIDTH": "Latin",
    "CYRILLIC": "Cyrillic",
    "GREEK": "Greek",
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "HIRAGANA": "Hiragana",
    "KATAKANA": "Katakana",
    "HALFWIDTH": "Katakana",
    "KATAKANA-HIRAGANA": "Katakana",
    "HANGUL": "Hangul",
    "ARABIC": "Arabic",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Devanagari",
    "THAI": "Thai",
}
SCRIPTS = (*dict.fromkeys(_BY_NAME.values()), DIGITS, SIGNS, OTHER)


@functools.lru_cache(maxsize=1 << 16)
def _of_character(character: str) -> str:
    """Returns one of `SCRIPTS`; digits and punctuation of any script are `DIGITS` and `SIGNS`."""
    category = unicodedata.category(character)
    if category in ("Nd", "No"):
        return DIGITS
    if category[0] in "PS":
        return SIGNS
    name = unicodedata.name(character, "") if category[0] in "LMN" else ""
    return _BY_NAME.get(name.split(" ")[0], OTHER)


def script_of(word: str) -> str:
    """Returns the script of the word's first letter, or `DIGITS` or `SIGNS` if it has no letter."""
    found = [_of_character(character) for character in word]
    for script in found:
        if script not in (DIGITS, SIGNS):
            return script
    return DIGITS if DIGITS in found else SIGNS


@dataclasses.dataclass
class Tally:
    """Counts over some text, and the rates computed from them.

    `characters` counts normalised characters except spaces, `covered` those with a piece.
    """

    bytes: int = 0
    words: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    byte_tokens: int = 0
    characters: int = 0
    covered: int = 0

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / max(self.words, 1)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(self.tokens, 1)

    @property
    def unknown_rate(self) -> float:
        return self.unknown_tokens / max(self.tokens, 1)

    @property
    def byte_rate(self) -> float:
        return self.byte_tokens / max(self.tokens, 1)

    @property
    def character_coverage(self) -> float:
        return self.covered / max(self.characters, 1)

    def as_dict(self) -> dict[str, Any]:
        counts = {field.name: getattr(self, field.name) for field in dataclasses.fields(Tally)}
        return counts | {name: round(getattr(self, name), 6) for name, _, _ in _RATES}

    def cells(self) -> list[str]:
        return [form.format(getattr(self, name)) for name, _, form in _RATES]


_RATES = (
    ("tokens_per_word", "tokens a word", "{:.3f}"),
    ("bytes_per_token", "bytes a token", "{:.3f}"),
    ("unknown_rate", "unknown tokens", "{:.4%}"),
    ("byte_rate", "byte-fallback tokens", "{:.4%}"),
    ("character_coverage", "characters covered", "{:.4%}"),
)


@dataclasses.dataclass
class Report(Tally):
    """Counts over a whole sample of text, and over its words by script.

    A script's bytes and tokens cover its words without white space, except for the space that
    SentencePiece puts before a word.
    """

    split: str = sources.TRAIN
    documents: int = 0
    pieces_used: int = 0
    pieces: int = 0
    by_script: dict[str, Tally] = dataclasses.field(default_factory=dict)

    @property
    def used_share(self) -> float:
        return self.pieces_used / max(self.pieces, 1)

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {
            "split": self.split,
            "documents": self.documents,
            "pieces_used": self.pieces_used,
            "pieces": self.pieces,
            "used_share": round(self.used_share, 6),
            "by_script": {script: tally.as_dict() for script, tally in self.by_script.items()},
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Report":
        def make(kind: Any, value: dict[str, Any]) -> Any:
            names = [field.name for field in dataclasses.fields(kind)]
            return kind(**{name: value[name] for name in names})

        found = {script: make(Tally, tally) for script, tally in value["by_script"].items()}
        return make(cls, {**value, "by_script": found})

    def __str__(self) -> str:
        return table([("", self)])


def as_json(reports: dict[str, Report]) -> dict[str, Any]:
    """Returns {corpus: report as JSON}; "" names a single corpus."""
    if list(reports) == [""]:
        return reports[""].as_dict()
    return {"corpora": {name: report.as_dict() for name, report in reports.items()}}


def read(path: str) -> dict[str, Report]:
    """Returns the reports in a file of `as_json`; raises UserError if it is missing or damaged."""
    try:
        value = files.read_json(path)
        found = value.get("corpora", {"": value})
        return {name: Report.from_dict(each) for name, each in found.items()}
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is missing or damaged, which the command wrote last: restore it from a copy, "
            "or delete the folder and run the command again"
        ) from error


def table(reports: list[tuple[str, Report]]) -> str:
    """Returns the reports side by side under their names, then each report by script."""
    columns = [
        [
            "held-out text" if report.split == sources.VALIDATION else "train (none held out)",
            f"{report.documents:,}",
            f"{report.bytes:,}",
            f"{report.tokens:,}",
            *report.cells(),
            f"{report.pieces_used:,} of {report.pieces:,} ({report.used_share:.1%})",
        ]
        for _, report in reports
    ]
    rates = [label for _, label, _ in _RATES]
    labels = ["measured on", "documents", "bytes", "tokens", *rates, "pieces used"]
    rows = list(zip(labels, *columns, strict=True))
    header, *lines = aligned(["", *(name for name, _ in reports)], rows).splitlines()
    parts = ["\n".join([header, *lines] if header else lines)]
    for name, report in reports:
        whole = max(report.bytes, 1)
        by_script = [
            [script, f"{tally.words:,}", f"{tally.bytes / whole:.1%}", *tally.cells()]
            for script, tally in report.by_script.items()
        ]
        shown = aligned(["", "words", "bytes", *rates], by_script)
        parts.append(f"{name}\n{shown}" if name else shown)
    return textwrap.indent("\n\n".join(parts), "  ")


def measure(loaded: Vocabulary, corpus: sources.Corpus) -> Report:
    """Measures a vocabulary on a sample of a corpus; raises UserError if it has no documents."""
    return of_texts(loaded, *sample(corpus))


def sample(corpus: sources.Corpus) -> tuple[str, list[str]]:
    """Returns (split, texts): about `_SAMPLE_BYTES` of validation, or of train if there is none.

    Pieces are read in the order of a hash of their names, so the sample comes from all over the
    corpus and is the same in every run.
    """
    for split in (sources.VALIDATION, sources.TRAIN):
        if texts := _texts(corpus, split):
            return split, texts
    raise UserError(f"corpus {corpus.spec} has no documents")


def of_texts(loaded: Vocabulary, split: str, texts: list[str], space: str = "") -> Report:
    """Reports on texts, with `space` before each word that is counted by script.

    Without `space`, tokenizers that add none, such as GPT-2's, cut words as at a text's start.
    """
    kinds = dict(enumerate(loaded.ids.kinds[: loaded.first_sentinel]))
    unknown = {token for token, kind in kinds.items() if kind == vocabulary.UNKNOWN}
    byte_pieces = {token for token, kind in kinds.items() if kind == vocabulary.BYTE}
    silent = (vocabulary.CONTROL, vocabulary.UNUSED)
    written = {token for token, kind in kinds.items() if kind not in silent} - unknown
    pieces = (loaded.ids.texts[token] for token in written - byte_pieces)
    shown = (
        piece if isinstance(piece, str) else piece.decode(errors="ignore").strip()
        for piece in pieces
    )
    characters = {text for text in shown if len(text) == 1}

    def add(tally: Tally, text: str, tokens: Counter[int], times: int = 1) -> None:
        normal = Counter(loaded.codec.normalize(text))
        del normal[SPACE], normal[" "]
        tally.bytes += times * len(text.encode())
        tally.tokens += times * tokens.total()
        tally.unknown_tokens += times * sum(tokens[token] for token in tokens.keys() & unknown)
        tally.byte_tokens += times * sum(tokens[token] for token in tokens.keys() & byte_pieces)
        tally.characters += times * normal.total()
        tally.covered += times * sum(normal[each] for each in normal.keys() & characters)

    report = Report(split=split, documents=len(texts), pieces=len(written))
    used: set[int] = set()
    words: Counter[str] = Counter()
    for text, ids in zip(texts, loaded.encode(texts), strict=True):
        tokens = Counter(ids.tolist())
        add(report, text, tokens)
        used |= tokens.keys()
        words.update(text.split())
    by_script: dict[str, Tally] = defaultdict(Tally)
    spaced = [space + word for word in words]
    encoded = loaded.encode(list(words) if space and _adds_space(loaded) else spaced)
    for (word, count), text, ids in zip(words.items(), spaced, encoded, strict=True):
        tally = by_script[script_of(word)]
        tally.words += count
        add(tally, text, Counter(ids.tolist()), count)
    report.words = words.total()
    report.pieces_used = len(written & used)
    report.by_script = {each: by_script[each] for each in SCRIPTS if each in by_script}
    return report


def _adds_space(loaded: Vocabulary) -> bool:
    """Returns whether a vocabulary itself adds a space, as Llama's; ours would be a second."""
    (of_a,) = loaded.encode(["a"])
    return len(of_a) > 0 and loaded.ids.texts[of_a[0]][:1] in (" ", b" ")


def _texts(corpus: sources.Corpus, split: str) -> list[str]:
    pieces = [piece for piece in corpus.pieces if split in piece.splits]
    pieces.sort(key=lambda piece: hashlib.sha256(piece.name.encode()).digest())
    texts: list[str] = []
    size = 0
    for piece in pieces:
        for its_split, batch in sources.read(corpus, piece):
            if its_split != split:
                continue
            columns = (batch.column(name).to_pylist() for name in corpus.spec.unit.columns)
            for text in itertools.chain.from_iterable(zip(*columns, strict=True)):
                if text:
                    texts.append(text)
                    size += len(text.encode())
                    if size >= _SAMPLE_BYTES:
                        return texts
    return texts
