"""Builds a task's cache from its corpus; run it again after anything and it goes on.

    python -m pipeline.build --task=python_docs_span_corruption --vocabulary=DIR --cache_dir=DIR

The cache is CACHE_DIR/TASK, where stock seqio looks for it. Its bytes follow from the corpus, the
vocabulary and the packing alone: not from the workers, the runner, or what was killed on the way.
Further flags are Beam's own (--runner=DataflowRunner --project=... and so on).
"""

import dataclasses

from tasks.cache.manifest import LONGEST_DOCUMENT_BYTES, PACKINGS, SEPARATORS
from tasks.terminal.command_line import Parser, positive, run, share


@dataclasses.dataclass(frozen=True)
class Options:
    """The command's own flags; `command_line` says what they mean."""

    task: str
    vocabulary: str
    cache_dir: str
    corpus: str | None
    row_tokens: int | None
    packing: str
    separator: str | None
    extra_ids: int
    shard_bytes: int
    max_document_bytes: int
    max_quarantined: float
    tokenizer: str
    extend: bool
    dry_run: bool
    price_per_vcpu_hour: float | None
    workers: int
    runner: str
    hf_token_secret: str | None
    task_module: str | None
    verbose: bool


def command_line() -> Parser:
    """Returns the parser of the command's own flags."""
    parser = Parser(prog="python -m pipeline.build", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", required=True, help="a registered task, such as rlm_span_corruption")
    add("--vocabulary", required=True, help="a folder of vocab.train, or a .model file")
    add("--cache_dir", required=True, help="the cache goes to CACHE_DIR/TASK")
    add(
        "--corpus",
        help="read this instead of the task's own: parquet:GLOB, json:GLOB, text:GLOB, "
        "hf:OWNER/NAME[:CONFIG][@REVISION] or python_docs, each with ?column=...&split=...",
    )
    add("--row_tokens", type=positive, help="tokens of a row (the window of the task if not set)")
    add(
        "--packing",
        choices=PACKINGS,
        default="concat",
        help="concat: documents flow across rows, and windows of any length can be cut from them; "
        "best_fit: rows are windows, and no document is cut that fits into one",
    )
    add(
        "--separator",
        choices=SEPARATORS,
        help="the token that ends a document (default: none, unless the task needs it)",
    )
    add("--extra_ids", type=int, default=0, help="sentinels to add to a vocabulary without any")
    add("--shard_bytes", type=positive, default=64 << 20, help="bytes of corpus in a shard, about")
    add(
        "--max_document_bytes",
        type=positive,
        default=LONGEST_DOCUMENT_BYTES,
        help="documents of more bytes are split at white space (%(default)s)",
    )
    add(
        "--max_quarantined",
        type=share,
        default=0.05,
        help="the share of documents that may be left out as faulty; empty ones do not count",
    )
    add(
        "--tokenizer",
        choices=("fast", "sentencepiece"),
        default="fast",
        help="what encodes: compiled code that gives SentencePiece's ids (audited), or itself",
    )
    add(
        "--extend",
        action="store_true",
        help="add files that are new in the corpus as further shards of the cache that is there",
    )
    add("--dry_run", action="store_true", help="only say what the build would come to")
    add(
        "--price_per_vcpu_hour",
        type=float,
        help="dollars, memory and disk included, for --dry_run on Dataflow (its list price if "
        "not set)",
    )
    add("--workers", type=positive, default=1, help="processes on this machine")
    add("--runner", default="FnApiRunner", help="Beam's runner; this one is Beam in this process")
    add(
        "--hf_token_secret",
        help="projects/PROJECT/secrets/NAME in Google's Secret Manager: where workers without an "
        "HF_TOKEN of their own find it",
    )
    add("--task_module", help="a module of yours with more tasks in a tuple TASKS")
    add("--verbose", action="store_true", help="show Beam's log")
    return parser


def main(argv: list[str]) -> None:
    """Parses the flags and builds; see pipeline.building.engine.build for what it raises."""
    parser = command_line()
    known, rest = parser.parse_known_args(argv)

    from pipeline.building import engine
    from pipeline.runners import beam_options

    options = Options(**vars(known))
    arguments = beam_options.arguments(parser, rest, options.runner, options.workers)
    engine.build(options, arguments)


if __name__ == "__main__":
    run(main)
