"""Counts a vocabulary's tokens in a corpus."""

import itertools
import multiprocessing
from collections.abc import Iterator

import numpy as np

from tasks.reading import sources
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary

# A worker's job.
_JOB: list[tuple[Vocabulary, sources.Corpus]] = []


def count(loaded: Vocabulary, corpus: sources.Corpus, workers: int = 1) -> np.ndarray:
    """Returns how often each id occurs in a corpus, int64 [size], for any number of processes.

    Raises UserError if the corpus is unreadable or empty, or the vocabulary is a user's class.
    """
    if loaded.is_registered:
        raise UserError(
            f"{loaded.name} is a class of --task_module: only SentencePiece models and "
            "tokenizer.json files can be cut"
        )
    total = np.zeros(loaded.size, np.int64)
    pieces = corpus.pieces
    with progress.shown("counting pieces", len(pieces)) as shown:
        for done, counts in enumerate(_counted(loaded, corpus, min(workers, len(pieces))), 1):
            total += counts
            shown.update(done)
    if not total.any():
        raise UserError(f"corpus {corpus.spec} has no text: name one in the language to keep")
    return total


def _counted(loaded: Vocabulary, corpus: sources.Corpus, workers: int) -> Iterator[np.ndarray]:
    numbers = range(len(corpus.pieces))
    if workers < 2:
        _begin(loaded, corpus)
        yield from map(_count, numbers)
        return
    # Send it without its library, which each process opens for itself.
    plain = Vocabulary(loaded.model, loaded.record, loaded.name)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _begin, (plain, corpus)) as pool:
        yield from pool.imap_unordered(_count, numbers)


def _begin(loaded: Vocabulary, corpus: sources.Corpus) -> None:
    _JOB[:] = [(loaded, corpus)]


def _count(number: int) -> np.ndarray:
    loaded, corpus = _JOB[0]
    counts = np.zeros(loaded.size, np.int64)
    for _, batch in sources.read(corpus, corpus.pieces[number]):
        columns = (batch.column(name).to_pylist() for name in corpus.spec.unit.columns)
        texts = [text for text in itertools.chain.from_iterable(columns) if text]
        for ids in loaded.encode(texts):
            counts += np.bincount(ids, minlength=loaded.size)
    return counts
