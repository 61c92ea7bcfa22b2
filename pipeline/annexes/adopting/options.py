"""Options of an adoption, the source of `palimpsest adopt`'s flags."""

import dataclasses
import os

from tasks.cache.manifest import ROWS
from tasks.terminal.flag_fields import REQUIRED, at_least, field

PAIRS, TARGETS = "pairs", "targets"
CONCAT = "concat"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one adoption, named like the flags."""

    cache_dir: str = field(
        REQUIRED,
        "folder of one task's cache, with info.train.json, or of Megatron's .bin and .idx files; "
        "its files are read and not changed",
    )
    vocabulary: str | None = field(
        None,
        "the vocabulary of the ids: a folder written by vocab.train, or a .model file; without it, "
        "text cannot be shown, and there are no sentinels for span corruption",
    )
    extra_ids: int = field(
        0, "number of sentinels to add to a vocabulary that has none, 100 for T5's"
    )
    task_module: str | None = field(None, "Python module that registers the vocabulary")
    read: str | None = field(
        None,
        "pairs: inputs and targets; targets: only those; by default pairs if the first row has "
        "inputs",
        choices=(PAIRS, TARGETS),
    )
    packing: str | None = field(
        None,
        "concat, the default: rows of targets are joined into one stream, from which windows of "
        "any length are cut; rows: each row is a window of its own",
        choices=(CONCAT, ROWS),
    )
    validation: str | None = field(
        None,
        "pattern for the names of Megatron data sets to use for validation, such as *_valid*; all "
        "others are for training",
    )
    index_dir: str | None = field(
        None,
        "folder to write index and manifest to, then to be passed as the trainer's --cache_dir; "
        "by default they are written beside the cache's files",
    )
    workers: int = field(os.cpu_count() or 1, "maximum worker processes", rule=at_least(1))
