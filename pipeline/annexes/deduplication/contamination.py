"""N-grams of evaluation sets, and the units of a corpus with too many of them.

Words are lower-case letters and digits without punctuation, as in the first two sources.

Sources: Brown et al. 2020 (GPT-3, arXiv:2005.14165), appendix C: n-grams of 13 words, down to 8 for
shorter examples; n-grams that collide with more than 10 training documents are ignored. Gao et al.
2020 (The Pile, arXiv:2101.00027) do the same. Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
section 8: 70 % of an example's 8-grams. GPT-3 cuts 200 characters around a collision, and drops
documents cut into more than ten parts; here the whole unit is dropped, a document or a line.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.annexes.deduplication import arrays, kernels
from pipeline.annexes.deduplication.plan import GRAMS, Job
from pipeline.tokenizer.word_tokenizer import buffers
from tasks.document_kind import SIDES
from tasks.reading import sources
from tasks.storage import files

_SIEVE_BITS = (16, 30)  # minimum and maximum; eight bits per n-gram between them


class Words:
    """Hashes of words and texts; each call overwrites the buffer."""

    def __init__(self) -> None:
        self._table = kernels.character_table()
        self._words = np.empty(0, np.uint64)

    def __call__(
        self, data: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (hashes of words, bounds, exact hashes); see `kernels.words_of`."""
        if len(self._words) < len(data) + len(begins):
            self._words = np.empty(len(data) + len(begins), np.uint64)
        bounds = np.zeros(len(begins) + 1, np.int64)
        exact = np.empty((len(begins), 2), np.uint64)
        kernels.words_of(data, begins, ends, self._table, self._words, bounds, exact)
        return self._words, bounds, exact


def text_bytes(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint8 bytes, int64[texts + 1] bounds) of texts, or of pairs with joined sides."""
    if "text" in batch.schema.names:
        texts = batch.column("text")
    else:
        sides = (batch.column(side).cast(pa.large_string()).fill_null("") for side in SIDES)
        texts = pc.binary_join_element_wise(*sides, pa.scalar("\n", pa.large_string()))
    return buffers(texts.cast(pa.large_string()).fill_null(""))


class Grams:
    """The n-grams of all examples: sorted hashes, and the examples that contain each."""

    def __init__(self, opened: arrays.Arrays):
        self.known = opened.read("known")  # uint64, sorted
        self.bounds = opened.read("bounds")  # int64[known + 1], ranges in `examples`
        self.examples = opened.read("examples")  # int32, numbers of examples
        self.totals = opened.read("totals")  # int64[examples], distinct n-grams per example
        self._names, self._name_bounds = opened.read("names"), opened.read("name_bounds")
        bits = min(max(_SIEVE_BITS[0], (8 * len(self.known)).bit_length()), _SIEVE_BITS[1])
        self._sieve = np.zeros(1 << bits, np.bool_)
        self._sieve[self.known >> np.uint64(64 - bits)] = True

    @classmethod
    def open(cls, folder: str) -> "Grams":
        return cls(arrays.Arrays(files.join(folder, GRAMS)))

    def name(self, example: int) -> str:
        begin, end = self._name_bounds[example : example + 2]
        return self._names[begin:end].tobytes().decode()

    def shared(self, words: np.ndarray, bounds: np.ndarray, ngram: int) -> np.ndarray:
        """Returns int64[found, 2], texts and n-grams; see `kernels.shared_grams`."""
        factors = kernels.gram_factors(ngram)
        return kernels.shared_grams(words, bounds, ngram, factors, self.known, self._sieve)


class Summary(NamedTuple):
    """Counts of an evaluation set; `short` examples have fewer words than an n-gram."""

    corpus: str
    examples: int
    short: int
    grams: int


def write_grams(folder: str, sets: list[sources.Corpus], ngram: int) -> list[Summary]:
    """Writes the sets' n-grams, using about 50 bytes of memory each; returns each set's summary."""
    reader = Words()
    hashes, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    names: list[str] = []
    summaries = []
    for corpus in sets:
        before, short, grams = len(names), 0, 0
        read = (batch for piece in corpus.pieces for _, batch in sources.read(corpus, piece))
        for batch in read:
            data, text_bounds = text_bytes(batch)
            words, bounds, _ = reader(data, text_bounds[:-1], text_bounds[1:])
            ids = batch.column("id").to_pylist()
            found, ends = kernels.grams_of(words, bounds, ngram, kernels.gram_factors(ngram))
            counts = np.diff(ends)
            hashes.append(found)
            owners.append(np.repeat(np.arange(len(ids)) + len(names), counts).astype(np.uint64))
            short += int((counts == 0).sum())
            grams += len(found)
            names += [f"{corpus.spec}:{each}" for each in ids]
        summaries.append(Summary(str(corpus.spec), len(names) - before, short, grams))
    pairs = np.unique(np.stack([np.concatenate(hashes), np.concatenate(owners)], 1), axis=0)
    known, first = np.unique(pairs[:, 0], return_index=True)
    encoded = [name.encode() for name in names]
    examples = pairs[:, 1].astype(np.int64)
    arrays.write(
        files.join(folder, GRAMS),
        {
            "known": known,
            "bounds": np.append(first, len(pairs)).astype(np.int64),
            "examples": examples,
            "totals": np.bincount(examples, minlength=len(names)),
            "names": np.frombuffer(b"".join(encoded), np.uint8),
            "name_bounds": np.cumsum([0, *map(len, encoded)]).astype(np.int64),
        },
    )
    return summaries


class Judge:
    """Decides which units are contaminated, after reading all pieces twice, one at a time."""

    def __init__(self, job: Job, pieces: Sequence[arrays.Arrays]):
        self._rules, self.grams = job.rules, Grams.open(job.folder)
        self._counted = np.ones(len(self.grams.known), bool)
        if job.rules.common:
            units = np.zeros(len(self.grams.known), np.int64)
            for piece in pieces:
                units += np.bincount(piece.read("grams")[:, 1], minlength=len(units))
            self._counted = units <= job.rules.common

    def contaminated(self, piece: arrays.Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int64, a piece's contaminated units in order; the first example in each)."""
        units, grams = piece.read("grams").astype(np.int64).T
        kept = self._counted[grams]
        units, grams = units[kept], grams[kept]
        begins = self.grams.bounds[grams]
        counts = self.grams.bounds[grams + 1] - begins
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        examples = self.grams.examples[np.repeat(begins, counts) + offsets]
        pairs = np.stack([np.repeat(units, counts), examples], 1)
        pairs, shared = np.unique(pairs, axis=0, return_counts=True)
        # 0.28 of 25 n-grams is 7, not floating point's 7.000000000000001.
        needed = self._rules.share * self.grams.totals[pairs[:, 1]] - 1e-9
        enough = shared >= np.maximum(1, needed)
        found, first = np.unique(pairs[enough, 0], return_index=True)
        return found, pairs[enough, 1][first]
