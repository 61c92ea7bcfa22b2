"""Options of a build, the source of `pipeline.build`'s flags."""

import dataclasses
import sys
from typing import ClassVar, TextIO

from pipeline.runners import engines, job_parts
from tasks.cache.manifest import KEEP, QUARANTINE, SEPARATORS, SPELLINGS, TEXT_PACKINGS, TOO_LONG
from tasks.reading import sources
from tasks.reading.long_documents import LONGEST_DOCUMENT_BYTES
from tasks.task import OBJECTIVES
from tasks.terminal.flag_fields import REQUIRED, SHARE, at_least, field
from tasks.vocabularies.sentencepiece_model import LAWS, OLD_LAW
from tasks.vocabulary import FORMS


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one build, named like the flags."""

    ANNEXES: ClassVar[str] = "flags.build"

    task: str = field(
        REQUIRED,
        "a registered task, such as rlm_span_corruption, or with --name one of the objectives "
        f"{', '.join(OBJECTIVES)}",
    )
    vocabulary: str = field(REQUIRED, FORMS)
    cache_dir: str = field(REQUIRED, "folder of caches; the cache is written to CACHE_DIR/TASK")
    corpus: tuple[str, ...] = field(
        (),
        f"corpus to read instead of the task's own: {sources.forms()}; for several languages, one "
        "with {language} in it, or NAME=SPEC, repeated",
        repeated=True,
    )
    languages: str | None = field(
        None,
        "languages that replace {language} in --corpus, such as ro,en; by default all with "
        "folders or files",
    )
    name: str | None = field(
        None, "name of your own --corpus; its task is then called NAME_TASK everywhere"
    )
    row_tokens: int | None = field(
        None, "tokens per row; the task's window if not set", rule=at_least(1)
    )
    packing: str = field(
        "concat",
        "concat: documents flow across rows, so windows of any length can be cut from them; "
        "best_fit: a row is a window, and documents that fit into a row are never cut",
        choices=TEXT_PACKINGS,
    )
    separator: str | None = field(
        None,
        "token written at the end of each document; by default what the task needs, else none",
        choices=SEPARATORS,
    )
    extra_ids: int = field(0, "number of sentinels to add to a vocabulary that has none")
    shard_bytes: int = field(64 << 20, "approximate bytes of corpus per shard", rule=at_least(1))
    max_document_bytes: int = field(
        LONGEST_DOCUMENT_BYTES,
        "maximum bytes of a document; longer ones are split at white space",
        rule=at_least(1),
    )
    max_inputs: int | None = field(
        None,
        "maximum number of input tokens of a pair, including EOS; no limit if not set",
        rule=at_least(1),
    )
    max_targets: int | None = field(
        None,
        "maximum number of target tokens of a pair, including EOS; no limit if not set",
        rule=at_least(1),
    )
    too_long: str | None = field(
        None,
        "pairs with a side longer than --max_inputs or --max_targets, or than "
        "--max_document_bytes: quarantine, the default, leaves them out and counts them; cut "
        "keeps the beginning of the side; split makes several pairs, each with a part of the long "
        "side and the whole other side",
        choices=TOO_LONG,
    )
    empty_targets: str = field(
        QUARANTINE,
        "pairs whose targets are empty: quarantine leaves them out and counts them; keep makes "
        "targets of EOS alone, as for questions without an answer",
        choices=(QUARANTINE, KEEP),
    )
    sentinels: str = field(
        QUARANTINE,
        "documents that spell a sentinel, such as <extra_id_0>: quarantine leaves them out and "
        "counts them; keep, for pairs, makes it the sentinel's id, as in a prompt of "
        "trainer.generate; text encodes it like other text",
        choices=SPELLINGS["sentinels"],
    )
    special_tokens: str = field(
        QUARANTINE,
        "documents that spell a special token of a tokenizer.json, such as </s> or <unk>: "
        "quarantine leaves them out and counts them; text encodes it like other text",
        choices=SPELLINGS["special_tokens"],
    )
    max_quarantined: float = field(
        0.05,
        "fail if more than this share of documents is faulty, from 0 to 1, as pairs with an empty "
        "side are; empty texts and pairs that are too long do not count as faulty",
        rule=SHARE,
    )
    max_unknown: float = field(
        0.1,
        "fail if more than this share of tokens, bytes or whole sides, from 0 to 1, is text that "
        "the vocabulary cannot spell; a share of 0.01 or more is printed with the characters",
        rule=SHARE,
    )
    tokenizer: str = field(
        "fast",
        "fast: compiled code that returns the library's ids, audited during the build, or the "
        "library if the code lacks the vocabulary; library: SentencePiece or, for a "
        "tokenizer.json, Hugging Face's tokenizers; sentencepiece: SentencePiece alone",
        choices=("fast", "library", "sentencepiece"),
    )
    sentencepiece_law: str = field(
        OLD_LAW,
        "releases of SentencePiece whose ids a unigram vocabulary gets: 0.1, those up to 0.2.1, or "
        "0.2.2, that one and later ones; they choose differently where segmentations nearly tie",
        choices=LAWS,
    )
    exclude: str | None = field(
        None,
        "exclude lists of a search for duplicates, or text files with one id per line, separated "
        "by commas: their documents are left out. In an existing cache, only the shards that hold "
        "them are rewritten. A list stays in force for every later build of the cache",
        joined=",",
    )
    extend: bool = field(
        False, "add the corpus's new files to the existing cache, as further shards"
    )
    part: str | None = job_parts.option()
    workers: int = field(1, "worker processes on this machine", rule=at_least(1))
    runner: str = field(
        engines.LOCAL,
        "cluster whose workers build; see docs/engines.md (default: workers of this machine)",
    )
    hf_token_secret: str | None = field(
        None,
        "Secret Manager secret projects/PROJECT/secrets/NAME, from which workers without an "
        "HF_TOKEN read their Hugging Face token",
    )
    task_module: str | None = field(
        None,
        "Python module that defines further tasks in a tuple TASKS or registers a vocabulary; "
        "workers also import it",
    )
    verbose: bool = field(False, "show the runner's log")
    runner_flags: tuple[str, ...] = field((), "the runner's", rest=engines.refuse_unknown)

    @property
    def notes(self) -> TextIO:
        """The stream for notes, which is the standard error if a dry run prints JSON."""
        flags = getattr(self, "dry_run", None)
        return sys.stderr if flags and flags.json else sys.stdout
