"""Memory that all clients of a server share: opened configurations, and batches just made.

It is bounded, and the entries used last stay. What two clients ask for at once is made once.
"""

import collections
import gc
import threading
import types
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import numpy as np

_Value = TypeVar("_Value")
# Objects behind a configuration that are looked at for arrays; a list of shards has thousands.
_MOST_OBJECTS = 1_000_000
# Without arrays, or with everything: each function leads to all that its module knows.
_LEFT_OUT = (
    type, str, bytes, int, float, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


class Shelf(Generic[_Value]):
    """Values by key, kept up to a total size and a number; `at_once` are made at a time."""

    def __init__(
        self,
        size: Callable[[_Value], int],
        most_bytes: int,
        most: int | None = None,
        at_once: int = 1,
    ):
        self._size, self._room = size, threading.BoundedSemaphore(at_once)
        self._most_bytes, self._most = most_bytes, most
        self._lock = threading.Lock()
        self._coming: dict[Hashable, Future[_Value]] = {}  # what is being made
        self._kept: collections.OrderedDict[Hashable, tuple[_Value, int]]
        self._kept = collections.OrderedDict()
        self.bytes = 0

    def ask(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Returns the value of a key, which `make` returns unless it is kept or being made."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
            coming = self._coming.get(key)
            if coming is None:
                own: Future[_Value] = Future()
                self._coming[key] = own
        if coming is not None:
            return coming.result()
        try:
            with self._room:
                value = make()
            size = self._size(value)
        except BaseException as error:
            own.set_exception(error)
            with self._lock:
                del self._coming[key]
            raise
        own.set_result(value)
        self._keep(key, value, size)
        return value

    def _keep(self, key: Hashable, value: _Value, size: int) -> None:
        with self._lock:
            del self._coming[key]
            if size > self._most_bytes:
                return
            self._kept[key] = value, size
            self.bytes += size
            while self.bytes > self._most_bytes or len(self._kept) > (self._most or len(self)):
                _, (_, freed) = self._kept.popitem(last=False)
                self.bytes -= freed

    def drop(self, value: _Value) -> None:
        """Forgets a value under all of its keys; the next `ask` makes another."""
        with self._lock:
            for key in [key for key, (kept, _) in self._kept.items() if kept is value]:
                self.bytes -= self._kept.pop(key)[1]

    def __len__(self) -> int:
        return len(self._kept)


def array_bytes(value: Any) -> int:
    """Returns the bytes of the arrays in memory to which an object leads."""
    seen, left, total = {id(value)}, [value], 0
    while left and len(seen) < _MOST_OBJECTS:
        one = left.pop()
        if isinstance(one, np.ndarray) and not isinstance(one, np.memmap):
            total += one.nbytes if one.base is None else 0
        others = [one.base] if isinstance(one, np.ndarray) else gc.get_referents(one)
        for other in others:
            if id(other) not in seen and not isinstance(other, _LEFT_OUT):
                seen.add(id(other))
                left.append(other)
    return total
