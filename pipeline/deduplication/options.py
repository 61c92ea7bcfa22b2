"""Options of a search for duplicates; `pipeline.dedup` makes its flags from them."""

import dataclasses
from typing import Annotated

from pipeline.deduplication.plan import DOCUMENT, DUPLICATES, NEAR, PARAGRAPH, UNITS, Rules
from tasks.reading.long_documents import LONGEST_DOCUMENT_BYTES
from tasks.terminal.command_line import at_least_0, positive, share
from tasks.terminal.fields import REQUIRED, field


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one search, by the names of the flags."""

    corpus: str = field(REQUIRED, "corpus SPEC, as of pipeline.build")
    output: str = field(REQUIRED, "folder for the list, exclude.arrow, and its report")
    unit: str = field(
        DOCUMENT,
        "what is compared and left out: documents, or paragraphs, which are the lines of a text; a "
        "build cuts those from their documents",
        choices=UNITS,
    )
    duplicates: str = field(
        NEAR,
        "near: exact and near duplicates; exact: texts that are equal but for case and white "
        "space; none: only what --against finds",
        choices=DUPLICATES,
    )
    bands: Annotated[int, positive] = field(14, "bands of MinHash values; more find less similar")
    rows: Annotated[int, positive] = field(8, "MinHash values a band; more find less")
    shingle: Annotated[int, positive] = field(5, "words of a shingle")
    min_words: Annotated[int | None, positive] = field(
        None, "units of fewer words are never listed; 1 for documents, 8 for paragraphs if not set"
    )
    min_similarity: Annotated[float, share] = field(
        0.0,
        "least estimated Jaccard similarity of near duplicates; by default, sharing a band is "
        "enough",
    )
    against: str | None = field(
        None,
        "SPECs of evaluation sets, separated by white space: units that share --ngram words with "
        "an example are listed as contaminated",
    )
    exclude: str | None = field(
        None,
        "exclude lists or text files of ids, separated by commas: their documents are not read, "
        "and so keep nothing; give them to the build as well",
    )
    ngram: Annotated[int, positive] = field(13, "words of an n-gram shared with an evaluation set")
    overlap: Annotated[float, share] = field(
        0.0, "least share of an example's n-grams in a unit; by default, one n-gram is enough"
    )
    common: Annotated[int, at_least_0] = field(
        10, "n-grams in more units than this are common phrases, and ignored; 0 ignores none"
    )
    shard_bytes: Annotated[int, positive] = field(
        64 << 20, "approximate bytes of corpus that are read at a time; does not change the list"
    )
    max_document_bytes: Annotated[int, positive] = field(
        LONGEST_DOCUMENT_BYTES, "bytes of the parts that longer documents are read in"
    )
    workers: Annotated[int, positive] = field(1, "worker processes on this machine")
    runner: str = field("FnApiRunner", "Beam runner; FnApiRunner runs on this machine")
    hf_token_secret: str | None = field(
        None, "Secret Manager secret with the Hugging Face token, as of pipeline.build"
    )
    verbose: bool = field(False, "show Beam's log")

    @property
    def rules(self) -> Rules:
        """Returns the criteria by which a unit is a duplicate."""
        return Rules(
            unit=self.unit,
            duplicates=self.duplicates,
            bands=self.bands,
            rows=self.rows,
            shingle=self.shingle,
            min_words=self.min_words or (8 if self.unit == PARAGRAPH else 1),
            min_similarity=self.min_similarity,
            ngram=self.ngram,
            share=self.overlap,
            common=self.common,
        )
