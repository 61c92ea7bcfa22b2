"""Options of a search for duplicates, the source of `pipeline.dedup`'s flags."""

import dataclasses

from pipeline.deduplication.plan import PARAGRAPH, Rules
from pipeline.runners import beam_options
from tasks.reading.long_documents import LONGEST_DOCUMENT_BYTES
from tasks.terminal.fields import REQUIRED, at_least, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Rules):
    """Options of one search, named like the flags."""

    corpus: str = field(REQUIRED, "corpus SPEC, as for pipeline.build")
    output: str = field(REQUIRED, "folder for the list, exclude.arrow, and its report")
    against: str | None = field(
        None,
        "SPECs of evaluation sets, separated by white space: units that share --ngram words with "
        "an example are listed as contaminated",
        joined=" ",
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
    workers: int = field(1, "worker processes on this machine", rule=at_least(1))
    runner: str = field("FnApiRunner", "Beam runner; FnApiRunner runs on this machine")
    hf_token_secret: str | None = field(
        None, "Secret Manager secret with the Hugging Face token, as for pipeline.build"
    )
    verbose: bool = field(False, "show Beam's log")
    beam: tuple[str, ...] = field((), "Beam's flags", rest=beam_options.refuse_unknown)

    @property
    def rules(self) -> Rules:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(Rules)}
        least = 8 if self.unit == PARAGRAPH else 1
        return Rules(**{**values, "min_words": self.min_words or least})
