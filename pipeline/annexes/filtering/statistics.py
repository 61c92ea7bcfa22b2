"""Statistics of a batch of texts, computed on demand."""

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from pipeline.annexes.filtering import kernels
from pipeline.tokenizer.word_tokenizer import buffers

_ANY_LENGTH = 1 << 62


class Statistics:
    """Statistics of each text of a batch, as int64[texts], by name.

    The names are `kernels.COLUMNS`, `_OF_LINES`, and "top_2" to "top_4" and "repeated_5" to
    "repeated_10" from `kernels.repeated_grams`. Statistics with a parameter are public methods.
    """

    def __init__(self, texts: pa.LargeStringArray):
        self.texts = texts
        self._data, self._bounds = buffers(texts)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @functools.cached_property
    def _words(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        most = (int(self._bounds[-1] - self._bounds[0]) + len(self) + 1) // 2 + 1
        exact, folded = np.empty(most, np.uint64), np.empty(most, np.uint64)
        sizes, ends = np.empty(most, np.int32), np.zeros(len(self) + 1, np.int64)
        counts = np.empty((len(self), len(kernels.COLUMNS)), np.int64)
        kernels.words_of(
            self._data, self._bounds, *kernels.properties(), exact, folded, sizes, ends, counts
        )
        return exact, folded, sizes, ends, counts

    @property
    def words(self) -> tuple[np.ndarray, np.ndarray]:
        """Exact and folded hashes of all words, uint64."""
        exact, folded, _, ends, _ = self._words
        return exact[: ends[-1]], folded[: ends[-1]]

    @functools.cached_property
    def lines(self) -> np.ndarray:
        return kernels.lines_of(self._data, self._bounds, kernels.properties()[0])

    @functools.cached_property
    def _grams(self) -> np.ndarray:
        exact, _, sizes, ends, _ = self._words
        out = np.empty((len(self), 9), np.int64)
        kernels.repeated_grams(exact, sizes, ends, out)
        return out

    @functools.cached_property
    def _paragraphs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lines = self.lines
        begins = np.flatnonzero(np.diff(lines["paragraph"], prepend=-1))
        sizes = np.add.reduceat(lines["characters"], begins) if len(begins) else begins
        places = np.arange(len(lines)) - np.repeat(begins, np.diff([*begins, len(lines)]))
        # Factors of a sum that depends on line order.
        factors = (2 * places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        hashes = lines["hash"] * factors
        hashes = np.add.reduceat(hashes, begins) if len(begins) else hashes
        return lines["text"][begins], sizes, hashes

    def _of_lines(self, chosen: np.ndarray | None = None, weights: bool = False) -> np.ndarray:
        """Counts each text's lines that `chosen` selects or, with `weights`, their characters."""
        lines = self.lines if chosen is None else self.lines[chosen]
        return self._sum(lines["text"], lines["characters"] if weights else None)

    def _sum(self, of: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        if values is None:
            return np.bincount(of, minlength=len(self))
        sums = np.zeros(len(self), np.int64)
        np.add.at(sums, of, values)
        return sums

    @functools.cached_property
    def _repeated_lines(self) -> np.ndarray:
        return kernels.repeats(self.lines["hash"], self.lines["text"])

    @functools.cached_property
    def _repeated_paragraphs(self) -> np.ndarray:
        text, _, hashes = self._paragraphs
        return kernels.repeats(hashes, text)

    def __getitem__(self, name: str) -> np.ndarray:
        if name in kernels.COLUMNS:
            return self._words[4][:, kernels.COLUMNS.index(name)]
        kind, _, size = name.rpartition("_")
        if kind in ("top", "repeated") and size.isdigit():
            return self._grams[:, int(size) - 2]
        return _OF_LINES[name](self)

    def bullet_lines(self, bullets: str) -> np.ndarray:
        codes = np.array([ord(bullet) for bullet in bullets], np.uint32)
        return self._of_lines(np.isin(self.lines["first"], codes))

    def short_lines(self, characters: int) -> np.ndarray:
        return self._of_lines(self.lines["characters"] < characters)

    def stop_words(self, words: tuple[str, ...]) -> np.ndarray:
        """Returns how many of the words (at most 64) occur in each text."""
        _, folded, _, ends, _ = self._words
        # A word counts once in whatever case; a word of signs alone has the hash 0.
        hashes = Statistics(pa.array([" ".join(words)], pa.large_string())).words[1]
        wanted = np.unique(hashes[hashes != 0])
        out = np.empty(len(self), np.int64)
        kernels.distinct(folded, ends, wanted, out)
        return out

    def script_letters(self, scripts: tuple[str, ...]) -> np.ndarray:
        table = np.zeros(len(kernels.properties()[0]), bool)
        for name in scripts:
            table[kernels.scripts()[name]] = True
        out = np.empty(len(self), np.int64)
        kernels.count_of(self._data, self._bounds, table, out)
        return out

    def kept_lines(
        self, end_marks: str, least_words: int, longest_word: int, phrases: tuple[str, ...]
    ) -> np.ndarray:
        """Returns bool[lines] that pass `check_lines` and have one of `end_marks`, if not ""."""
        lines = self.lines
        kept = np.ones(len(lines), bool)
        if end_marks:
            marks = np.array([ord(mark) for mark in end_marks], np.uint32)
            kept = np.isin(lines["last"], marks) & ~lines["ellipsis"]
        begins, ends = (np.ascontiguousarray(lines[name]) for name in ("begin", "end"))
        bits, (coded, coded_ends) = kernels.properties()[0], _coded(phrases)
        kernels.check_lines(
            self._data, begins, ends, bits, least_words, longest_word, coded, coded_ends, kept
        )
        return kept

    def with_phrase(self, phrases: tuple[str, ...]) -> np.ndarray:
        """Returns bool[texts], texts with one of the phrases, ignoring ASCII case."""
        clean = np.ones(len(self), bool)
        places, rule = (self._bounds[:-1], self._bounds[1:]), (0, _ANY_LENGTH, *_coded(phrases))
        kernels.check_lines(self._data, *places, kernels.properties()[0], *rule, clean)
        return ~clean

    def with_lines(self, kept: np.ndarray) -> pa.LargeStringArray:
        text, begin, end = map(
            np.ascontiguousarray, (self.lines[name] for name in ("text", "begin", "end"))
        )
        data, bounds = kernels.joined_lines(self._data, text, begin, end, kept, len(self))
        parts = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.large_string(), len(self), parts)


def _coded(phrases: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    coded = [phrase.encode().lower() for phrase in phrases]  # changes only ASCII letters
    ends = np.cumsum([len(each) for each in coded], dtype=np.int64)
    return np.frombuffer(b"".join(coded), np.uint8), ends


def _punctuated_lines(of: Statistics) -> np.ndarray:
    is_mark = kernels.properties()[0] & kernels.PUNCTUATION != 0
    return of._of_lines(is_mark[of.lines["last"]])


def _longest_line(of: Statistics) -> np.ndarray:
    longest = np.zeros(len(of), np.int64)
    np.maximum.at(longest, of.lines["text"], of.lines["characters"])
    return longest


def _of_repeated_paragraphs(of: Statistics, weights: bool) -> np.ndarray:
    text, sizes, _ = of._paragraphs
    repeated = of._repeated_paragraphs
    return of._sum(text[repeated], sizes[repeated] if weights else None)


_OF_LINES: dict[str, Callable[[Statistics], np.ndarray]] = {
    "lines": lambda of: of._of_lines(),
    "line_characters": lambda of: of._of_lines(weights=True),
    "longest_line": _longest_line,
    "ellipsis_lines": lambda of: of._of_lines(of.lines["ellipsis"]),
    "punctuated_lines": _punctuated_lines,
    "duplicate_lines": lambda of: of._of_lines(of._repeated_lines),
    "duplicate_line_characters": lambda of: of._of_lines(of._repeated_lines, weights=True),
    "paragraph_count": lambda of: of._sum(of._paragraphs[0], None),
    "duplicate_paragraphs": lambda of: _of_repeated_paragraphs(of, weights=False),
    "duplicate_paragraph_characters": lambda of: _of_repeated_paragraphs(of, weights=True),
}
