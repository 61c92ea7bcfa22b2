"""Maps a function over descriptions of work as a Beam job, with one-line errors.

Unlike Beam, it handles dying workers, user mistakes, noisy logs and a Ctrl-C ignored by the shell.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pickle
import sys
import tempfile
import threading
import traceback
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.runners import beam_options, local_workers
from tasks.reading.corpus import Corpus, CorpusSpec
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.terminal.interruption import SERVICE_LIMIT_SECONDS, interruptible
from tasks.terminal.polling import polling

_FAILURE = "the job stopped: "
# Namespace of the job's counters in Dataflow.
_COUNTERS = "palimpsest"
# Elements per chunk, uncompressed bytes per chunk, and bytes of all chunks in a graph.
_CHUNK = 256
_CHUNK_BYTES = 16 << 20
_GRAPH_BYTES = 4 << 20


class WorkerFailure(Exception):
    """A UserError or OSError in a worker, as text that every runner forwards."""

    def __init__(self, **value: Any):
        super().__init__(_FAILURE + json.dumps(value))


class _Call:
    """Calls `function` in a worker, counts, and wraps its errors."""

    def __init__(self, function: Callable[[Any], Mapping[str, int]], folder: str):
        self._function, self._folder = function, folder

    def __call__(self, element: Any) -> None:
        from apache_beam.metrics import Metrics

        try:
            for name, count in self._function(element).items():
                Metrics.counter(_COUNTERS, name).inc(count)
        except UserError as error:
            raise WorkerFailure(message=str(error)) from error
        except OSError as error:
            if error.errno is None:
                raise
            place = str(error.filename or self._folder)
            raise WorkerFailure(errno=error.errno, message=error.strerror, path=place) from error


def without_pieces(corpus: Corpus) -> Corpus:
    """Returns a corpus for workers: each is sent its own pieces, out of perhaps a million files."""
    record = {key: value for key, value in corpus.record.items() if key != "files"}
    return dataclasses.replace(corpus, record=record, pieces=(), notes=())


@contextlib.contextmanager
def files_shown(
    title: str, folder: str, sizes: Mapping[str, int], unit: str = ""
) -> Iterator[None]:
    """Shows progress during the block: the total of `sizes`, by name, of files in `folder`."""

    def done() -> int:
        return sum(sizes[name] for name in sizes.keys() & set(files.list_names(folder)))

    def look() -> None:
        bar.update(done())

    with progress.shown(title, sum(sizes.values()), done(), unit) as bar:
        with polling(look, files.is_remote(folder)):
            yield
        bar.update(sum(sizes.values()))


def _service(arguments: list[str]) -> Any:
    from pipeline.runners import dataflow, portable

    (runner,) = [each.partition("=")[2] for each in arguments if each.startswith("--runner=")]
    return next((each for each in (dataflow, portable) if each.is_runner(runner)), None)


def check(arguments: list[str], corpus: CorpusSpec, folder: str) -> None:
    """Raises a UserError for a mistake that a service would report only from the running job."""
    if service := _service(arguments):
        service.check(arguments, corpus, folder)


def run(
    function: Callable[[Any], Mapping[str, int]],
    elements: Sequence[Any],
    folder: str,
    arguments: list[str],
    verbose: bool,
) -> Counter[str]:
    """Calls `function`, which must be repeatable, on elements in a Beam job; sums its counts.

    `folder` holds the results; errors that name no file are given its name. Raises a UserError if a
    worker died or found a mistake that the user can correct, and an OSError if one could not read
    or write.
    """
    if workers := beam_options.local_workers(arguments):
        return local_workers.run(function, elements, folder, workers)
    beam = beam_options.import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    service = _service(arguments)
    quiet = contextlib.nullcontext() if verbose else _quiet()
    with contextlib.ExitStack() as stack:
        if service:
            arguments = stack.enter_context(service.prepared(arguments, folder))
        chunks = stack.enter_context(_sendable(_packed(elements), folder))
        stack.enter_context(quiet)
        interruption = stack.enter_context(interruptible())
        if service:
            interruption.seconds = SERVICE_LIMIT_SECONDS
        try:
            try:
                pipeline = beam.Pipeline(options=PipelineOptions(arguments))
            except ValueError as error:
                raise UserError(f"Beam refuses its flags: {error}") from error
            _ = (
                pipeline
                | "Pieces" >> beam.Create(chunks)
                | "Unpack" >> beam.FlatMap(_unpacked)
                | "Spread" >> beam.Reshuffle()
                | "Work" >> beam.Map(_Call(function, folder))
            )
            result = pipeline.run()
            _wait(result, service, arguments)
            counters = result.metrics().query()["counters"]
            ours = (each for each in counters if each.key.metric.namespace == _COUNTERS)
            return Counter(
                {each.key.metric.name: each.committed or each.attempted or 0 for each in ours}
            )
        except BaseException as error:
            if interruption.happened:
                raise KeyboardInterrupt from error
            _raise_failure(error)
            if service and (explained := service.explain(error, arguments)):
                raise explained from error
            raise


def _packed(elements: Sequence[Any], most: int = _CHUNK) -> list[bytes]:
    """Returns compressed chunks of at most `most` elements, fewer if large."""
    chunks = []
    for start in range(0, len(elements), most):
        data = pickle.dumps(elements[start : start + most])
        if len(data) > _CHUNK_BYTES and most > 1:
            chunks += _packed(elements[start : start + most], most // 2)
        else:
            chunks.append(zlib.compress(data))
    return chunks


def _unpacked(chunk: bytes | tuple[str, int, int]) -> Sequence[Any]:
    if isinstance(chunk, bytes):
        return pickle.loads(zlib.decompress(chunk))
    path, start, stop = chunk
    with files.open_read(path) as file:
        file.seek(start)
        return pickle.loads(zlib.decompress(file.read(stop - start)))


@contextlib.contextmanager
def _sendable(chunks: list[bytes], folder: str) -> Iterator[list[Any]]:
    """Yields the chunks or, if too large for a job's graph, (file in `folder`, begin, end) of each.

    Dataflow rejects graphs above 10 MB; a million files take 30 MB.
    """
    if sum(map(len, chunks)) <= _GRAPH_BYTES:
        yield chunks
        return
    path = files.join(folder, f"{files.PARTIAL}{uuid.uuid4().hex}-elements")
    ends = list(itertools.accumulate(map(len, chunks)))
    files.write_bytes(path, b"".join(chunks))
    try:
        yield [(path, *place) for place in itertools.pairwise([0, *ends])]
    finally:
        files.remove(path)


def _wait(result: Any, service: Any, arguments: list[str]) -> None:
    try:
        if service:
            service.announce(result, arguments)
        result.wait_until_finish()
    except KeyboardInterrupt:
        if service:
            service.cancel(result, arguments)
        raise


def _raise_failure(error: BaseException) -> None:
    """Raises the worker's error if the text of `error` contains a WorkerFailure."""
    _, found, text = str(error).partition(_FAILURE)
    if not found:
        return
    value, _ = json.JSONDecoder().raw_decode(text)
    if "errno" in value:
        raise OSError(value["errno"], value["message"], value["path"]) from error
    raise UserError(value["message"]) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses logs and stderr, where Beam prints every exception; shows stderr after a bug."""
    import grpc

    logger, usual, usual_hook = logging.getLogger(), sys.stderr, threading.excepthook
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    usual.flush()
    with os.fdopen(os.dup(2), "w") as shown, tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        sys.stderr = shown  # this process's output, such as the progress bar
        # Errors of Beam's threads, such as lost connections to a killed worker.
        threading.excepthook = lambda failed: traceback.print_exception(
            failed.exc_value, file=sys.__stderr__
        )

        def later_hook(failed: Any) -> None:
            if not isinstance(failed.exc_value, grpc.RpcError):  # some outlive a job
                usual_hook(failed)

        try:
            yield
        except KeyboardInterrupt:
            later_hook = lambda failed: None  # noqa: E731 - errors that follow from it
            raise
        except (UserError, OSError):
            raise
        except BaseException:
            aside.seek(0)
            shown.write(aside.read().decode(errors="replace"))
            raise
        finally:
            sys.stderr, threading.excepthook = usual, later_hook
            shown.flush()
            os.dup2(shown.fileno(), 2)
            logger.setLevel(level)
