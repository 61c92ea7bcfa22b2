"""A Beam job that is one map over descriptions of work, and ends well or in one clear line.

What Beam would hide is seen to here: workers that died, faults of the user inside a worker, logs,
Ctrl-C where a shell ignores it.
"""

import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.runners import beam_options
from tasks.terminal.command_line import UserError

_FAILURE = "the job stopped: "
# The namespace of the job's counters, as Dataflow shows them.
_COUNTERS = "palimpsest"
# Elements that travel together.
_CHUNK = 256


class WorkerFailure(Exception):
    """A user's or the machine's fault found by a worker, as text that survives any runner."""

    def __init__(self, **value):
        super().__init__(_FAILURE + json.dumps(value))


class _Call:
    """Calls `function` in a worker; its counts become the job's, its faults WorkerFailures."""

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


def run(
    function: Callable[[Any], Mapping[str, int]],
    elements: Sequence[Any],
    folder: str,
    arguments: list[str],
    verbose: bool,
) -> Counter[str]:
    """Calls `function` with every element, somewhere, with Beam's `arguments`; returns its sums.

    Args:
      function: may be pickled; what it does must be safe to do twice. It returns counts.
      elements: descriptions of work.
      folder: where its results go, named when the machine's fault names no file.
      arguments: of Beam.
      verbose: whether to show Beam's logs.

    Raises:
      UserError: a worker met a mistake that the user can mend, or died.
      OSError: a worker could not write or read.
    """
    beam = beam_options.import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    place = _place(arguments)
    quiet = contextlib.nullcontext() if verbose else _quiet()
    with contextlib.ExitStack() as stack:
        if place:
            arguments = stack.enter_context(place.prepared(arguments, folder))
        stack.enter_context(quiet)
        stack.enter_context(_interruptible())
        deaths = stack.enter_context(_worker_deaths())
        try:
            try:
                pipeline = beam.Pipeline(options=PipelineOptions(arguments))
            except ValueError as error:
                raise UserError(f"Beam refuses its flags: {error}") from error
            _ = (
                pipeline
                | "Pieces" >> beam.Create(_packed(elements))
                | "Unpack" >> beam.FlatMap(_unpacked)
                | "Spread" >> beam.Reshuffle()
                | "Work" >> beam.Map(_Call(function, folder))
            )
            result = pipeline.run()
            _wait(result, place, arguments)
            return _sums(result)
        except BaseException as error:
            if deaths:
                raise UserError(
                    f"a worker process died ({deaths[0]}): if memory ran out, use fewer --workers; "
                    "what is finished is kept, run the same command to go on"
                ) from error
            if "KeyboardInterrupt" in str(error):  # it hit the call of a worker in this process
                raise KeyboardInterrupt from error
            _raise_failure(error)
            if place and (explained := place.explain(error, arguments)):
                raise explained from error
            raise


def _place(arguments: list[str]) -> Any:
    """The module that knows the service which `arguments` give the job to, if there is one."""
    from pipeline.runners import dataflow, portable

    (runner,) = [each.partition("=")[2] for each in arguments if each.startswith("--runner=")]
    return next((place for place in (dataflow, portable) if place.is_runner(runner)), None)


def _packed(elements: Sequence[Any]) -> list[bytes]:
    """Chunks of the elements, small: Dataflow refuses a graph of more than 10 MB."""
    return [
        zlib.compress(pickle.dumps(elements[start : start + _CHUNK]))
        for start in range(0, len(elements), _CHUNK)
    ]


def _unpacked(chunk: bytes) -> Sequence[Any]:
    return pickle.loads(zlib.decompress(chunk))


def _wait(result: Any, place: Any, arguments: list[str]) -> None:
    """Waits for the job; when interrupted, nothing of it goes on elsewhere."""
    try:
        if place:
            place.announce(result, arguments)
        result.wait_until_finish()
    except KeyboardInterrupt:
        if place:
            place.cancel(result, arguments)
        raise


def _sums(result: Any) -> Counter[str]:
    counters = result.metrics().query()["counters"]
    ours = (each for each in counters if each.key.metric.namespace == _COUNTERS)
    return Counter({each.key.metric.name: each.committed or each.attempted or 0 for each in ours})


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
