"""Settings of a run's input: lengths, mixtures, caches, vocabularies."""

import dataclasses

from tasks.mixture import SIZES
from tasks.storage import files
from tasks.terminal.fields import ReadIf, Rule, above, at_least, check, field, require

_SHUFFLES = ("global", "block", "none")
# Version of the data order; runs begun with another version cannot be resumed.
_ORDER = 2


_SEQIO = ReadIf(
    lambda config: config.reads_seqio, lambda config: f"on --task={config.task}", whole=True
)
_CACHES = ReadIf(
    lambda config: not config.reads_seqio, lambda config: f"on --task={config.task}", whole=True
)
_FOLLOWS = ReadIf(lambda config: config.data.follow, "without --data.follow", whole=True)
_PACKED = ReadIf(
    lambda config: config.data.pack_examples, "without --data.pack_examples=true", whole=True
)
_REMOTE = ReadIf(
    lambda config: (
        not config.reads_seqio and (not config.cache_dir or files.is_remote(config.cache_dir))
    ),
    lambda config: (
        f"on --task={config.task}"
        if config.reads_seqio
        else "with a local --cache_dir, from which nothing is copied"
    ),
    whole=True,
)


@dataclasses.dataclass(frozen=True)
class LengthsConfig:
    """Lengths of an example's features, in tokens, EOS included."""

    inputs: int | None = field(
        None,
        "tokens of the inputs, EOS included; None: the task's own length",
        rule=at_least(0),
        often="tokens of the inputs",
    )
    targets: int | None = field(
        None,
        "tokens of the targets, EOS included; None: the task's own length",
        rule=at_least(0),
        often="tokens of the targets",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class MixingConfig:
    """Settings of the mixture of tasks; `tasks.mixture` explains rates.

    No task repeats a window because its rate changes.
    """

    maximum: int | None = field(
        None,
        "upper limit of the size that determines a task's rate, 1 or more; None: the mixture's",
        rule=at_least(1),
        read_if=_CACHES,
    )
    temperature: float | None = field(
        None,
        "sizes are raised to the power 1 / temperature; above 0; None: the mixture's",
        rule=above(0),
        read_if=_CACHES,
    )
    alpha: float | None = field(
        None,
        "power to which sizes are raised, from 0 (equal rates) to 1 (rates in proportion to "
        "sizes); mT5's is 0.3; an alternative to temperature; None: the mixture's",
        rule=Rule("from 0 to 1", lambda value: 0 <= value <= 1),
        read_if=_CACHES,
    )
    size: str | None = field(
        None,
        "size of the training split that determines a task's rate; examples = windows at this "
        "run's lengths; documents, tokens and bytes as counted in the cache; None: the mixture's, "
        "by default examples",
        choices=SIZES,
        read_if=_CACHES,
    )
    max_epochs: float | None = field(
        None,
        "maximum number of epochs of any task in the whole run, above 0; what a task loses goes "
        "to the others in proportion to their rates; UniMax with alpha=0; None: the mixture's, by "
        "default no limit",
        rule=above(0),
        read_if=_CACHES,
    )
    schedule: str = field(
        "",
        "rates or tasks that apply from an update on, as '20000: a=0.5,b=0.5; 40000: b=1'; a "
        "resumed run may change only entries that lie ahead",
        changes="later_batches",
        read_if=_CACHES,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Settings of reading the cache."""

    shuffle: str = field(
        "global",
        "order of an epoch's windows; global = all are permuted, block = blocks of whole shards "
        "are permuted, and the windows within each, for a remote cache larger than the disk, none "
        "= the cache's order",
        choices=_SHUFFLES,
        changes="batches",
    )
    order: int = field(
        _ORDER,
        "version of the order of data; runs begun with version 1 cannot be resumed",
        choices=(_ORDER,),
        unstored=1,
        changes="batches",
        read_if=ReadIf(
            lambda config: not config.reads_seqio,
            "with a seqio task, whose rows seqio orders",
            whole=True,
        ),
    )
    take: str | None = field(
        None,
        "amount of each task's training split to read, from its beginning, in every epoch, as "
        "0.01 for a share, '2^29 tokens' or '1000 documents'; 'TASK: AMOUNT; TASK: AMOUNT' for "
        "some tasks of a mixture; None: all of it",
        read_if=_CACHES,
    )
    follow: bool = field(
        False,
        "train while caches are being built: the first epoch reads the shards in the planned "
        "order and waits if it overtakes the build; finished caches give the same batches "
        "(docs/training.md)",
        often="train while the cache is being built",
        aliases=("--follow",),
        read_if=_CACHES,
    )
    follow_shards: int = field(
        4,
        "with follow, number of shards that are shuffled together in the first epoch and read by "
        "evaluations during the run; 1 or more",
        rule=at_least(1),
        read_if=_FOLLOWS,
    )
    follow_timeout_seconds: float | None = field(
        3600.0,
        "with follow, seconds to wait while no build is alive and no shard is finished; None: "
        "forever",
        rule=above(0),
        read_if=_FOLLOWS,
        changes="nothing",
    )
    block_bytes: int = field(
        16 << 30,
        "with shuffle=block, maximum size of a block in bytes; 1 or more",
        rule=at_least(1),
        changes="batches",
        read_if=ReadIf(
            lambda config: config.data.shuffle == "block" and not config.reads_seqio,
            "without --data.shuffle=block",
            whole=True,
        ),
    )
    local_bytes: int = field(
        50 << 30,
        "maximum number of bytes of a remote cache's shards on the local disk; 1 or more",
        rule=at_least(1),
        changes="nothing",
        read_if=_REMOTE,
    )
    local_dir: str | None = field(
        None,
        "folder for local copies of a remote cache's shards, which the next start reuses; None: a "
        "temporary folder",
        changes="nothing",
        read_if=_REMOTE,
    )
    # One thread is fastest for small batches, by benchmarks/input_pipeline.py.
    threads: int = field(
        1,
        "threads that make batches; 1 is fastest for small batches",
        rule=at_least(1),
        changes="nothing",
        read_if=_CACHES,
    )
    prefetch: int = field(
        4,
        "maximum number of batches made in advance; 1 or more",
        rule=at_least(1),
        changes="nothing",
    )
    use_cached: bool | None = field(
        None,
        "read a seqio task from its seqio cache; true = warn if it has none, false = never; None: "
        "if it has one",
        changes="batches",
        read_if=_SEQIO,
    )
    pack: bool = field(
        True,
        "pack several examples of a seqio task into each row; false = one example per row",
        changes="batches",
        read_if=_SEQIO,
    )
    pack_examples: bool = field(
        False,
        "pack several examples of a cache's task into each training row of --lengths",
        changes="batches",
        read_if=_CACHES,
    )
    segment_documents: bool = field(
        False,
        "let tokens attend only to their own document: each document of a row is a segment",
        read_if=_CACHES,
    )
    example_inputs: int | None = field(
        None, "with pack_examples, input tokens of each example; None: the task's, or for pairs "
        "the row's",
        rule=at_least(1), changes="batches", read_if=_PACKED)  # fmt: skip
    example_targets: int | None = field(
        None, "with pack_examples, target tokens of each example; None: the task's, or for pairs "
        "the row's",
        rule=at_least(1), changes="batches", read_if=_PACKED)  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class VocabularyConfig:
    """The vocabulary that tasks and caches must have."""

    model_file: str | None = field(
        None, "SentencePiece model with which the cache must have been built; None: any"
    )
    extra_ids: int | None = field(
        None,
        "required number of sentinels beyond the vocabulary's pieces; None: any",
        rule=at_least(0),
    )

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class OldVocabularyConfig:
    """The vocabulary with which the parameters of `init_from` were trained."""

    path: str | None = field(
        None,
        "old vocabulary, needed if --init_from has none; rows are matched by piece "
        "(docs/vocabulary.md); None: read it from --init_from",
    )
    extra_ids: int | None = field(
        None,
        "number of sentinels to add to path, 100 for T5's model; None: none",
        rule=at_least(0),
        read_if=ReadIf(lambda config: config.path is not None, "without init_from_vocabulary.path"),
    )
    id_map: str | None = field(
        None,
        "id_map.json of vocab.train --extend or vocab.trim, or its folder, which maps old rows to "
        "new ones; None: match by piece",
    )

    def __post_init__(self) -> None:
        check(self)
        require(
            self.id_map is None or self.path is None,
            "OldVocabularyConfig.id_map",
            self.id_map,
            "left out beside init_from_vocabulary.path: either one says which rows are carried",
        )
