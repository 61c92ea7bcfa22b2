"""Applies a function to many elements in processes on this machine, in order."""

import collections
import itertools
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, ClassVar

import palimpsest_home
from tasks.terminal import progress
from tasks.terminal.child import end_with
from tasks.terminal.command_line import UserError
from tasks.terminal.interrupt import shielded

# Less data takes less time than starting worker processes.
SMALL_BYTES = 64 << 20

_function: Callable[[Any], Any]


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main

    def __reduce__(self) -> tuple[Any, ...]:
        # The new process imports nothing of ours before this; `tasks` may be a user's file.
        return palimpsest_home.new, (__name__, type(self).__name__), self.__dict__


class Spawn(SpawnContext):
    """Starts processes that do not import the parent's main module.

    That module may be a script that calls a command without checking `__name__`, or stdin.
    """

    Process: ClassVar[Any] = _Process


def in_order(
    title: str,
    make: Callable[..., Callable[[Any], Any]],
    arguments: tuple[Any, ...],
    elements: Sequence[Any],
    sizes: Sequence[int],
    workers: int,
    chunk: int = 1,
    note: Callable[[], str] = str,
) -> Iterator[Any]:
    """Yields the results of the function `make(*arguments)`, made once in each process.

    A single worker is this process; several workers are sent `chunk` elements at a time. They
    ignore Ctrl-C, and end with their parent. Progress is shown in `sizes`, bytes of the
    elements, with a `note`. Raises a UserError if a worker dies.
    """
    if workers == 1:
        results: Iterator[Any] = map(make(*arguments), elements)
    else:
        chunks = (elements[start : start + chunk] for start in range(0, len(elements), chunk))
        results = _by_workers(make, arguments, chunks, workers)
    with progress.shown(title, sum(sizes), 0, "B") as bar:
        for result, done in zip(results, itertools.accumulate(sizes), strict=True):
            yield result
            bar.update(done, note())


def _by_workers(
    make: Callable[..., Any], arguments: tuple[Any, ...], chunks: Iterator[Any], workers: int
) -> Iterator[Any]:
    began = (os.getpid(), make, arguments)
    pool = ProcessPoolExecutor(workers, Spawn(), initializer=_start, initargs=began)
    running: collections.deque[Future[list[Any]]] = collections.deque()
    others, over = set(multiprocessing.active_children()), False

    def submit(count: int) -> None:
        for some in itertools.islice(chunks, count):
            with shielded():  # it may start a worker
                running.append(pool.submit(_apply, some))

    try:
        submit(2 * workers)
        while running:
            yield from running.popleft().result()
            submit(1)
        over = True
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process died: if memory ran out, use fewer --workers than {workers}"
        ) from error
    finally:
        if not over:  # nobody waits for what the workers are at
            with shielded():
                for worker in set(multiprocessing.active_children()) - others:
                    worker.kill()
        pool.shutdown(cancel_futures=True)


def _start(
    parent: int, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]
) -> None:
    global _function
    end_with(parent)
    _function = make(*arguments)


def _apply(elements: Sequence[Any]) -> list[Any]:
    return list(map(_function, elements))
