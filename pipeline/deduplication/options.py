"""Options of a search for duplicates, the source of `pipeline.dedup`'s flags."""

import dataclasses

from pipeline.deduplication.plan import DOCUMENT, DUPLICATES, NEAR, PARAGRAPH, UNITS, Rules
from tasks.reading.long_documents import LONGEST_DOCUMENT_BYTES
from tasks.terminal.fields import REQUIRED, SHARE, at_least, field


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one search, named like the flags."""

    corpus: str = field(REQUIRED, "corpus SPEC, as of pipeline.build")
    output: str = field(REQUIRED, "folder for the list, exclude.arrow, and its report")
    unit: str = field(
        DOCUMENT,
        "what is compared and left out: documents, or paragraphs (lines of text), which a build "
        "cuts from their documents",
        choices=UNITS,
    )
    duplicates: str = field(
        NEAR,
        "near: exact and near duplicates; exact: texts that are equal except for case and white "
        "space; none: only what --against finds",
        choices=DUPLICATES,
    )
    bands: int = field(
        14, "bands of MinHash values; with more, less similar texts are found", rule=at_least(1)
    )
    rows: int = field(
        8, "MinHash values per band; with more, fewer texts are found", rule=at_least(1)
    )
    shingle: int = field(5, "words of a shingle", rule=at_least(1))
    min_words: int | None = field(
        None,
        "shorter units, in words, are never listed; by default 1 for documents, 8 for paragraphs",
        rule=at_least(1),
    )
    min_similarity: float = field(
        0.0,
        "least estimated Jaccard similarity of near duplicates; by default, sharing a band is "
        "enough",
        rule=SHARE,
    )
    against: str | None = field(
        None,
        "SPECs of evaluation sets, separated by white space: units that share --ngram words with "
        "an example are listed as contaminated",
    )
    exclude: str | None = field(
        None,
        "exclude lists or text files of ids, separated by commas: their documents are not read, "
        "so nothing counts as a duplicate of them; give them to the build as well",
    )
    ngram: int = field(13, "words of an n-gram shared with an evaluation set", rule=at_least(1))
    overlap: float = field(
        0.0,
        "least share of an example's n-grams in a unit; by default, one n-gram is enough",
        rule=SHARE,
    )
    common: int = field(
        10,
        "n-grams that occur in more units than this are ignored as common phrases; 0: none are",
        rule=at_least(0),
    )
    shard_bytes: int = field(
        64 << 20,
        "approximate bytes of corpus that are read at a time; does not change the list",
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
        None, "Secret Manager secret with the Hugging Face token, as of pipeline.build"
    )
    verbose: bool = field(False, "show Beam's log")

    @property
    def rules(self) -> Rules:
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
