"""Options of a search for duplicates, the source of `palimpsest dedup`'s flags."""

import dataclasses

from pipeline.annexes.deduplication.plan import PARAGRAPH, Rules
from pipeline.runners import engines, job_parts
from tasks.reading.long_documents import LONGEST_DOCUMENT_BYTES
from tasks.terminal.flag_fields import REQUIRED, at_least, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Rules):
    """Options of one search, named like the flags."""

    corpus: tuple[str, ...] = field(
        REQUIRED,
        "corpus SPEC, as for pipeline.build: one, one with {language} in it, or NAME=SPEC or SPEC, "
        "repeated; duplicates are looked for in all together",
        repeated=True,
    )
    languages: str | None = field(
        None,
        "languages that replace {language} in --corpus, such as ro,en; by default all with "
        "folders or files",
    )
    output: str = field(REQUIRED, "folder for the list, exclude.arrow, and its report")
    against: tuple[str, ...] = field(
        (),
        "SPEC of an evaluation set; may be repeated, or name several, separated by white space: "
        "units that share --ngram words with an example are listed as contaminated",
        repeated=True,
    )
    exclude: str | None = field(
        None,
        "exclude lists or text files of ids, separated by commas: their documents are not read, "
        "so nothing counts as a duplicate of them; give them to the build as well",
        joined=",",
    )
    shard_bytes: int = field(
        64 << 20,
        "approximate number of corpus bytes to read at a time; does not change the list",
        rule=at_least(1),
    )
    max_document_bytes: int = field(
        LONGEST_DOCUMENT_BYTES,
        "longer documents are read in parts of this many bytes",
        rule=at_least(1),
    )
    part: str | None = job_parts.option()
    workers: int = field(1, "worker processes on this machine", rule=at_least(1))
    runner: str = field(
        engines.LOCAL,
        "cluster whose workers build; see docs/engines.md (default: workers of this machine)",
    )
    hf_token_secret: str | None = field(
        None, "Secret Manager secret with the Hugging Face token, as for pipeline.build"
    )
    verbose: bool = field(False, "show the runner's log")
    runner_flags: tuple[str, ...] = field((), "the runner's", rest=engines.refuse_unknown)

    @property
    def rules(self) -> Rules:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(Rules)}
        least = 8 if self.unit == PARAGRAPH else 1
        return Rules(**{**values, "min_words": self.min_words or least})
