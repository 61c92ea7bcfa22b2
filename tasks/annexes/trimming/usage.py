"""Counts a vocabulary's tokens in a corpus."""

import itertools
from collections.abc import Callable

import numpy as np

from tasks.reading import sources
from tasks.reading.sources import Corpus
from tasks.terminal import processes
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary


def count(loaded: Vocabulary, corpus: Corpus, workers: int = 1) -> np.ndarray:
    """Returns how often each id occurs in a corpus, int64 [size], for any number of processes.

    Raises UserError if the corpus is unreadable or empty, or the vocabulary is a user's class.
    """
    if loaded.is_registered:
        raise UserError(
            f"{loaded.name} is a class of --task_module: only SentencePiece models and "
            "tokenizer.json files can be cut"
        )
    pieces = corpus.pieces
    sizes = [piece.bytes for piece in pieces]
    workers = max(1, min(workers, len(pieces)))
    if workers > 1:  # sent without its library, which each process opens for itself
        loaded = Vocabulary(loaded.model, loaded.record, loaded.name)
    counts = processes.in_order(
        "counting pieces", _counter, (loaded, corpus), range(len(pieces)), sizes, workers
    )
    total = sum(counts, np.zeros(loaded.size, np.int64))
    if not total.any():
        raise UserError(f"corpus {corpus.spec} has no text: name one in the language to keep")
    return total


def _counter(loaded: Vocabulary, corpus: Corpus) -> Callable[[int], np.ndarray]:
    def count(number: int) -> np.ndarray:
        counts = np.zeros(loaded.size, np.int64)
        for _, batch in sources.read(corpus, corpus.pieces[number]):
            columns = (batch.column(name).to_pylist() for name in corpus.spec.unit.columns)
            texts = [text for text in itertools.chain.from_iterable(columns) if text]
            for ids in loaded.encode(texts):
                counts += np.bincount(ids, minlength=loaded.size)
        return counts

    return count
