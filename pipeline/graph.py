"""The Beam graph: pieces of the corpus in, shards of the cache out, nothing in between.

Map-only: what crosses Beam is a description of a piece. One call reads, tokenizes, packs and writes
it, a batch of documents at a time, so memory does not grow with the piece.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator

import numpy as np

from pipeline import beam_options, tokenize
from pipeline.write import ShardWriter
from tasks import files, sources, vocabulary
from tasks.command_line import UserError
from tasks.manifest import VOCABULARY, Plan
from tasks.pack import Documents

# The reasons noted for a document of which nothing is left after normalisation, and for one whose
# text spells a sentinel: in a batch it could not be told from the noise.
EMPTY = "empty"
SENTINEL = "contains a sentinel such as <extra_id_0>"

_FAILURE = "pipeline.build stopped: "


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker is told: the cache's folder and plan, and the resolved corpus."""

    folder: str
    plan: Plan
    corpus: sources.Corpus


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A piece of the corpus and the shards it becomes: (split, number there) of each."""

    piece: sources.Piece
    shards: tuple[tuple[str, int], ...]


class WorkerFailure(Exception):
    """A user's or the machine's fault found by a worker, as text that survives any runner."""

    def __init__(self, **value):
        super().__init__(_FAILURE + json.dumps(value))


def build_piece(job: Job, assignment: Assignment) -> None:
    """Reads a piece and writes its shards.

    Raises:
      UserError: the corpus cannot be read, or the cache's vocabulary is not the plan's.
      OSError: the shards cannot be written.
    """
    vocabulary = _vocabulary(job.folder, job.plan.vocabulary.sha256, job.plan.vocabulary.extra_ids)
    ordinal = 0
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(job.folder, job.plan, split, index))
            for split, index in assignment.shards
        }
        for split, batch in sources.read(job.corpus, assignment.piece):
            writer = writers[split]
            ids = batch.column("id").to_pylist()
            problems = batch.column("problem").to_pylist()
            texts = batch.column("text").fill_null("")
            tokens, lengths = tokenize.encode(vocabulary, texts)
            tokens, lengths, spelt = tokenize.without_sentinels(vocabulary, tokens, lengths)
            kept = np.flatnonzero(lengths)
            for number in np.flatnonzero(lengths == 0).tolist():
                location = f"{assignment.piece.name}, document {ordinal + number}"
                reason = SENTINEL if spelt[number] else problems[number] or EMPTY
                writer.quarantine(ids[number], location, reason)
            if len(kept):
                sizes = tokenize.text_bytes(texts)[kept]
                documents = Documents([ids[number] for number in kept], tokens, lengths[kept])
                writer.add(documents, int(sizes.sum()))
            ordinal += len(ids)


@functools.lru_cache(maxsize=1)
def _vocabulary(folder: str, sha256: str, extra_ids: int) -> vocabulary.Vocabulary:
    """Loads the cache's own copy: a worker on another machine has no other."""
    path = files.join(folder, VOCABULARY)
    loaded = vocabulary.load(path, extra_ids)
    if loaded.record.sha256 != sha256:
        raise UserError(f"{path} is not the vocabulary of plan.json; delete it and run again")
    return loaded


def _process(job: Job, assignment: Assignment) -> None:
    try:
        build_piece(job, assignment)
    except UserError as error:
        raise WorkerFailure(message=str(error)) from error
    except OSError as error:
        if error.errno is None:
            raise
        place = error.filename or job.folder
        raise WorkerFailure(errno=error.errno, message=error.strerror, path=str(place)) from error


def run(job: Job, assignments: list[Assignment], arguments: list[str], verbose: bool) -> None:
    """Runs the assignments with Beam's `arguments`; returns when all are done.

    Raises:
      UserError: a worker met a mistake that the user can mend.
      OSError: a worker could not write or read.
    """
    beam = beam_options.import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    quiet = contextlib.nullcontext() if verbose else _quiet()
    with quiet, _interruptible(), _worker_deaths() as deaths:
        try:
            pipeline = beam.Pipeline(options=PipelineOptions(arguments))
            _ = (
                pipeline
                | "Pieces" >> beam.Create(assignments)
                | "Spread" >> beam.Reshuffle()
                | "Build" >> beam.Map(functools.partial(_process, job))
            )
            pipeline.run().wait_until_finish()
        except BaseException as error:
            if deaths:
                raise UserError(
                    f"a worker process died ({deaths[0]}): if memory ran out, use fewer --workers; "
                    "finished shards are kept, run the same command to go on"
                ) from error
            if "KeyboardInterrupt" in str(error):  # it hit the call of a worker in this process
                raise KeyboardInterrupt from error
            _raise_failure(error)
            raise


def _raise_failure(error: BaseException) -> None:
    """Raises what a worker wrapped in a WorkerFailure, if `error` carries one anywhere."""
    _, found, text = str(error).partition(_FAILURE)
    if not found:
        return
    value, _ = json.JSONDecoder().raw_decode(text)
    if "errno" in value:
        raise OSError(value["errno"], value["message"], value["path"]) from error
    raise UserError(value["message"]) from error


def interrupt() -> None:
    """Stops `run` from another thread as Ctrl-C does: the signal wakes a main thread that waits."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets `interrupt` through also where a shell started this with `&`, which ignores SIGINT."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _worker_deaths() -> Iterator[list[str]]:
    """Interrupts the block when a worker process is killed: Beam would wait for it for ever."""
    deaths: list[str] = []
    usual = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if "Worker subprocess exited" in str(failed.exc_value):
            deaths.append(str(failed.exc_value))
            interrupt()
        else:  # Beam's threads that talked to the worker; to where _quiet holds it back
            traceback.print_exception(failed.exc_value, file=sys.__stderr__)

    threading.excepthook = hook
    try:
        yield deaths
    finally:
        threading.excepthook = usual


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back logs and what others write to stderr, unless the block fails by a fault of ours.

    Beam's worker processes print every exception there, those too that end as one clear line.
    """
    logger, usual = logging.getLogger(), sys.stderr
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    usual.flush()
    with os.fdopen(os.dup(2), "w") as shown, tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        sys.stderr = shown  # what this process itself prints, such as the progress bar
        try:
            yield
        except (UserError, OSError, KeyboardInterrupt):
            raise
        except BaseException:
            aside.seek(0)
            shown.write(aside.read().decode(errors="replace"))
            raise
        finally:
            sys.stderr = usual
            shown.flush()
            os.dup2(shown.fileno(), 2)
            logger.setLevel(level)
