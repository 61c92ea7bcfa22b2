"""The files that an adoption finds, of whatever program."""

import dataclasses
from collections.abc import Callable

from pipeline.adopting.scan import Scan


@dataclasses.dataclass(frozen=True)
class Found:
    """Another program's cache.

    Attributes:
      program: one of `tasks.cache.adopted.PROGRAMS`.
      files: split -> names of its files of records, in their order.
      examples: split -> number of rows that the program says there are, if it does.
      is_pairs: whether rows of pairs are read.
      scan: (name of a file of records, number of ids, id of EOS) -> its content; runs in other
        processes.
      token: numpy's name of the type of a token, "" in records.
      unread: names of features that are not read.
      version: version of the program, "" if it does not say.
      unknown: what cannot be known of the cache.
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
