"""The files found by an adoption, from any program."""

import dataclasses
from collections.abc import Callable

from pipeline.adopting.scan import Scan


@dataclasses.dataclass(frozen=True)
class Found:
    """Another program's cache.

    Attributes:
      program: one of `tasks.cache.adopted.PROGRAMS`.
      files: split -> ordered names of its record files.
      examples: split -> number of rows, if the program states it.
      scan: (record file, number of ids, id of EOS) -> its content; runs in other processes.
      token: NumPy name of the token type; "" for records.
      unread: names of unread features.
      unknown: properties that cannot be determined.
    """

    program: str
    files: dict[str, tuple[str, ...]]
    examples: dict[str, int]
    is_pairs: bool
    scan: Callable[[str, int, int], Scan]
    token: str = ""
    unread: tuple[str, ...] = ()
    version: str = ""
    unknown: tuple[str, ...] = ("corpus", "borders of documents", "text")
