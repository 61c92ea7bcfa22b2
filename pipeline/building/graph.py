"""A map from pieces of the corpus to shards of the cache, on any engine.

Only descriptions of pieces pass through it; a piece is read and written in bounded memory.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pyarrow as pa

from pipeline.building import documents
from pipeline.building.write import ShardWriter
from pipeline.exclusion.filter import Filter
from pipeline.runners import secret
from pipeline.runners.engines import Engine, without_pieces
from pipeline.tokenizer import spelling, tokenize
from tasks import annexes, registry, vocabulary
from tasks.cache.manifest import Plan, shard_file
from tasks.reading import batches, sources
from tasks.terminal.command_line import UserError
from tasks.vocabularies import registered


class Stage(Protocol):
    """A stage that an annex adds between the reading and the writing of documents.

    `tally` counts them, by (kind, reason).
    """

    tally: Counter[tuple[str, str]]

    def __call__(
        self, batch: pa.RecordBatch, quarantine: Callable[..., None], edits: Counter[str]
    ) -> pa.RecordBatch: ...


def filtering(name: str) -> Any:
    """Returns an entry of the annex with filters; raises a UserError without it."""
    found = annexes.get("filters", name)
    if found is None:
        raise UserError("the cache's documents pass filters, which this installation lacks")
    return found


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything a worker needs.

    `tokenizer`, one of `tokenize.ENGINES`, does not affect the output. The Hub's token is in the
    secret `hf_token_secret`; `task_module` registers the vocabulary. Either may be "".
    `fingerprint` is the plan's, set once the plan lacks its files.
    """

    folder: str
    plan: Plan
    corpus: sources.Corpus
    tokenizer: str = tokenize.FAST
    hf_token_secret: str = ""
    task_module: str = ""
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A piece of the corpus and its shards, each (split, number in the split)."""

    piece: sources.Piece
    shards: tuple[tuple[str, int], ...]

    def names(self, plan: Plan, kind: str) -> set[str]:
        """Returns the names of one kind of the shards' files."""
        return {shard_file(split, kind, index, plan.shards[split]) for split, index in self.shards}


def build_piece(job: Job, assignment: Assignment, filters: Stage | None = None) -> Counter[str]:
    """Reads a piece and writes its shards; returns counts for the job's metrics.

    `filters` count what each rule drops; by default they are made from the plan. Raises a UserError
    if the corpus cannot be read, the cache's vocabulary is not the plan's, or the audit finds that
    the fast tokenizer and the library differ.
    """
    secret.provide_hf_token(job.hf_token_secret)
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        vocabulary, tokenizer, speller = stack.enter_context(_tokenizer(job))
        before = Counter(tokenizer.documents)
        of = job.folder, job.plan
        writers = {
            split: stack.enter_context(ShardWriter(*of, split, index, job.fingerprint))
            for split, index in assignment.shards
        }
        lists = [each.sha256 for each in job.plan.exclude or ()]
        excluding = {split: Filter.of_cache(job.folder, lists) for split in writers if lists}
        if filters is None and job.plan.filters:
            filters = filtering("stage")(job.plan.filters)
        limits = documents.Limits.of(job.plan, job.corpus.max_document_bytes)
        for split, batch in batches.gathered(sources.read(job.corpus, assignment.piece)):
            writer, listed = writers[split], excluding.get(split)
            if listed:
                batch = listed(batch, writer.quarantine)
                writer.cut_paragraphs = listed.cut
            if filters:
                batch = filters(batch, writer.quarantine, writer.edits)
            reader = documents.Reader(vocabulary, tokenizer, limits, speller)
            counts.update(documents.write(batch, writer, reader, listed))
    counts.update(Counter(tokenizer.documents) - before)
    return counts


_Loaded = tuple[vocabulary.Vocabulary, tokenize.Tokenizer, spelling.Speller | None]
# Idle tokenizers, by their origin. Runners may call from several threads, and two threads must not
# share a tokenizer: each call takes one and returns it.
_idle: dict[tuple, list[_Loaded]] = {}


@contextlib.contextmanager
def _tokenizer(job: Job) -> Iterator[_Loaded]:
    """Yields the cache's copy of the vocabulary and a tokenizer that no other thread uses."""
    record = job.plan.vocabulary
    law = job.plan.law
    key = (job.folder, record, job.tokenizer, job.plan.spelling, law)
    if key not in _idle:
        _idle.clear()
    waiting = _idle.setdefault(key, [])
    try:
        loaded = waiting.pop()
    except IndexError:
        if job.task_module and record.file == registered.FILE:
            registry.load(job.task_module)
        of_cache = vocabulary.of_cache(job.folder, record)
        choice, speller = job.plan.spelling, None
        if choice:
            speller = spelling.Speller(of_cache, choice, job.tokenizer, law)
        loaded = of_cache, tokenize.Tokenizer(of_cache, job.tokenizer, law), speller
    try:
        yield loaded
    finally:
        waiting.append(loaded)


def for_workers(job: Job) -> Job:
    """Returns the job without its pieces and file list."""
    corpus = without_pieces(job.corpus)
    plan = dataclasses.replace(job.plan, corpus=corpus.record)
    fingerprint = job.plan.fingerprint
    return dataclasses.replace(job, corpus=corpus, plan=plan, fingerprint=fingerprint)


def run(job: Job, pieces: list[Assignment], runner: Engine) -> Counter[str]:
    """Builds the pieces; returns the sums of `build_piece`'s counts.

    If the engine keeps order, every split's first shards come first, for a run that follows.
    """
    slim = for_workers(job)
    if runner.is_local:
        with _tokenizer(slim):  # loaded once, before the workers are forked
            pass
    work = functools.partial(build_piece, slim)
    ordered = sorted(pieces, key=lambda each: min(number for _, number in each.shards))
    return runner.run(work, ordered, job.folder)
