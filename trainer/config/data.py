"""Settings of a run's input: lengths, mixtures, caches, vocabularies."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tasks.mixture import SIZES
from tasks.storage import files
from tasks.terminal.flag_fields import SHARE, Checked, ReadIf, Rule, above, at_least, field
from trainer.config.skips import Skips, is_valid

_SHUFFLES = ("global", "block", "none")
# Version of the data order; runs begun with another version cannot be resumed.
_ORDER = 2


def _on_task(holds: Callable[[Any], bool]) -> ReadIf:
    return ReadIf(holds, lambda config: f"on --task={config.task}", whole=True)


_SEQIO = _on_task(lambda config: config.data_scheme)
# Of fields that other engines do not read.
OURS = ReadIf(
    lambda config: config.engine == "palimpsest",
    lambda config: f"with --engine={config.engine}",
    whole=True,
)
ON_CACHES = _on_task(lambda config: not config.data_scheme)
_PACKED = ReadIf(
    lambda config: config.data.pack_examples, "without --data.pack_examples=true", whole=True
)
_REMOTE = ReadIf(
    lambda config: (
        not config.data_scheme and (not config.cache_dir or files.is_remote(config.cache_dir))
    ),
    lambda config: (
        f"on --task={config.task}"
        if config.data_scheme
        else "with a local --cache_dir, from which nothing is copied"
    ),
    whole=True,
)


def _length(side: str) -> Any:
    return field(
        None,
        f"number of tokens in the {side}, including EOS; None: the task's own length",
        rule=at_least(0),
        often=f"tokens in the {side}",
    )


def _example_length(kind: str) -> Any:
    return field(
        None,
        f"with pack_examples, {kind} tokens per example; None: the task's, or the row's for pairs",
        rule=at_least(1),
        changes="batches",
        read_if=_PACKED,
    )


@dataclasses.dataclass(frozen=True)
class LengthsConfig(Checked):
    """Lengths of an example's features, in tokens."""

    inputs: int | None = _length("inputs")
    targets: int | None = _length("targets")


@dataclasses.dataclass(frozen=True)
class MixingConfig(Checked):
    """Settings of the mixture of tasks; `tasks.mixture` explains rates.

    A change of rate never makes a task repeat a window.
    """

    maximum: int | None = field(
        None,
        "upper limit on the size that sets a task's rate, 1 or more; None: the mixture's",
        rule=at_least(1),
    )
    temperature: float | None = field(
        None,
        "raise sizes to the power 1 / temperature; above 0; None: the mixture's",
        rule=above(0),
    )
    alpha: float | None = field(
        None,
        "raise sizes to this power, instead of setting temperature: 0 gives equal rates, 1 rates "
        "proportional to size; mT5 uses 0.3; None: the mixture's",
        rule=SHARE,
    )
    size: str | None = field(
        None,
        "how to measure a task's training split: in examples (windows at this run's lengths), or "
        "in documents, tokens or bytes of the cache; None: the mixture's, by default examples",
        choices=SIZES,
    )
    max_epochs: float | None = field(
        None,
        "maximum number of epochs of any task over the whole run, above 0; the rest goes to the "
        "other tasks in proportion to their rates; with alpha=0 this is UniMax; None: the "
        "mixture's, by default no limit",
        rule=above(0),
    )
    schedule: str = field(
        "",
        "rates that take effect at given updates, such as '20000: a=0.5,b=0.5; 40000: b=1'; on "
        "resume, only future entries may change",
        changes="later_batches",
        joined=";",
    )


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """Settings for reading the cache."""

    shuffle: str = field(
        "global",
        "order of the windows in an epoch: global permutes all of them; block permutes blocks of "
        "whole shards and the windows within each, for a remote cache larger than the disk; none "
        "keeps the cache's order",
        choices=_SHUFFLES,
        changes="batches",
    )
    order: int = field(
        _ORDER,
        "version of the data order; runs begun with version 1 cannot be resumed",
        choices=(_ORDER,),
        unstored=1,
        changes="batches",
        read_if=ON_CACHES._replace(why="with a seqio task, because seqio orders its rows"),
    )
    take: str | None = field(
        None,
        "how much of each task's training split to read in every epoch, from its start: a share "
        "such as 0.01, '2^29 tokens', '1000 documents', or 'TASK: AMOUNT; TASK: AMOUNT' for some "
        "tasks of a mixture; None: all of it",
        read_if=ON_CACHES,
    )
    skip: tuple[str, ...] = field(
        (),
        "batches not to train on, as ranges FIRST:NEXT counted from 1: after 41000:41200, update "
        "41000 reads batch 41200, and later updates the batches after it; on resume, only batches "
        "that were not read yet may change (docs/training.md)",
        rule=Rule(
            "ranges FIRST:NEXT of batches, counted from 1, each after the one before and with "
            "FIRST below NEXT, such as 41000:41200,52000:52100",
            is_valid,
        ),
        changes="later_batches",
    )
    block_bytes: int = field(
        16 << 30,
        "with shuffle=block, maximum size of a block in bytes; 1 or more",
        rule=at_least(1),
        changes="batches",
        read_if=ReadIf(
            lambda config: config.data.shuffle == "block" and not config.data_scheme,
            "without --data.shuffle=block",
            whole=True,
        ),
    )
    local_bytes: int = field(
        50 << 30,
        "maximum number of bytes of a remote cache to keep on the local disk; 1 or more",
        rule=at_least(1),
        changes="nothing",
        read_if=_REMOTE,
    )
    local_dir: str | None = field(
        None,
        "folder for local copies of a remote cache's shards, reused by the next start; None: a "
        "temporary folder",
        changes="nothing",
        read_if=_REMOTE,
    )
    # One thread is fastest for small batches, according to benchmarks/input_pipeline.py.
    threads: int = field(
        1,
        "threads that make batches; 1 is fastest for small batches",
        rule=at_least(1),
        changes="nothing",
        read_if=ON_CACHES,
    )
    prefetch: int = field(
        4, "maximum number of batches to prefetch; 1 or more", rule=at_least(1), changes="nothing"
    )
    use_cached: bool | None = field(
        None,
        "read a seqio task from its seqio cache; true warns if there is none, false never reads "
        "it; None: read it if there is one",
        changes="batches",
        read_if=_SEQIO,
    )
    pack: bool = field(
        True,
        "pack several examples of a seqio task into each row; false: one example per row",
        changes="batches",
        read_if=_SEQIO,
    )
    pack_examples: bool = field(
        False,
        "pack several examples of a cached task into each training row, whose size --lengths sets",
        changes="batches",
        read_if=ON_CACHES,
    )
    segment_documents: bool = field(
        False,
        "let tokens attend only to their own document: each document in a row is a segment",
        read_if=ON_CACHES,
    )
    example_inputs: int | None = _example_length("input")
    example_targets: int | None = _example_length("target")

    @property
    def skips(self) -> Skips:
        """The batches left out."""
        return Skips(self.skip)


@dataclasses.dataclass(frozen=True)
class VocabularyConfig(Checked):
    """The vocabulary that tasks and caches must have."""

    model_file: str | None = field(
        None, "SentencePiece model that the cache must have been built with; None: any"
    )
    extra_ids: int | None = field(
        None, "required number of sentinels beyond the pieces; None: any", rule=at_least(0)
    )
