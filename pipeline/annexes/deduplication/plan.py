"""Parameters of a search for duplicates, and files of its folder."""

import dataclasses
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks.reading import sources
from tasks.storage import files
from tasks.terminal.flag_fields import SHARE, at_least, field

FORMAT = 2
PLAN = "plan.json"
REPORT = "report.json"
LIST = "exclude.arrow"
GRAMS = "grams.arrays"
# Files of the stages, deleted after the list is written.
SIGNATURES, EDGES = "signatures", "edges"

DOCUMENT, PARAGRAPH = "document", "paragraph"
UNITS = (DOCUMENT, PARAGRAPH)
NEAR, EXACT, NONE = "near", "exact", "none"
DUPLICATES = (NEAR, EXACT, NONE)
# Number of index ranges of sorted keys, one per first byte.
PREFIXES = 256
# Approximate number of units per key partition, up to 67 million units; above that, there are 256
# partitions.
_PARTITION = 1 << 18
# Probability that 8 bits of two different MinHash values agree.
_CHANCE = 1 / 256


@dataclasses.dataclass(frozen=True)
class Rules:
    """The criteria for duplicates and contamination; each field is a flag of palimpsest dedup."""

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
        14, "bands of MinHash values; more bands find less similar texts", rule=at_least(1)
    )
    rows: int = field(8, "MinHash values per band; more values find fewer texts", rule=at_least(1))
    shingle: int = field(5, "number of words in a shingle", rule=at_least(1))
    min_words: int | None = field(
        None,
        "units with fewer words are never listed; by default 1 for documents, 8 for paragraphs",
        rule=at_least(1),
    )
    min_similarity: float = field(
        0.0,
        "minimum estimated Jaccard similarity of near duplicates; by default, sharing a band is "
        "enough",
        rule=SHARE,
    )
    ngram: int = field(13, "words per n-gram to look up in evaluation sets", rule=at_least(1))
    share: float = field(
        0.0,
        "minimum share of an example's n-grams in a unit; by default, one n-gram is enough",
        rule=SHARE,
        name="overlap",
    )
    common: int = field(
        10,
        "n-grams that occur in more units than this are ignored as common phrases; 0 ignores none",
        rule=at_least(0),
    )

    @property
    def near(self) -> bool:
        return self.duplicates == NEAR

    @property
    def hashes(self) -> int:
        return self.bands * self.rows

    @property
    def threshold(self) -> float:
        """The similarity where `probability` is steepest, (1 / bands)^(1 / rows).

        Source: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2.
        """
        return (1 / self.bands) ** (1 / self.rows)

    @property
    def wanted(self) -> float:
        """The minimum similarity of a near duplicate in reports."""
        return self.min_similarity or self.threshold

    def probability(self, similarity: float) -> float:
        """Returns the probability that a pair with this Jaccard similarity shares a band."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def least_equal(self) -> int:
        """Returns the minimum number of equal signature values of a pair with `min_similarity`."""
        if not self.min_similarity:
            return 0
        return max(1, round(_equal(self.min_similarity) * self.hashes))

    def estimate(self, equal: Any) -> Any:
        """Returns the estimated Jaccard similarity, given numbers of equal 8-bit values.

        Source: Li and König 2010, "b-Bit Minwise Hashing" (arXiv:0910.3349), section 2.
        """
        return ((equal / self.hashes - _CHANCE) / (1 - _CHANCE)).clip(0, 1)

    def unlike(self) -> np.ndarray:
        """Returns float64[hashes + 1], the probability that a pair is less similar than `wanted`.

        Item k is for k equal signature values, with a uniform prior on the similarity s. Given s, k
        is binomial over `hashes` with probability s + (1 - s) / 256; so the posterior of that
        probability is Beta(k + 1, hashes - k + 1), truncated to values above 1 / 256.
        """
        below, impossible = (
            _beta_cdf(share, self.hashes) for share in (_equal(self.wanted), _CHANCE)
        )
        # For long signatures and small k, the whole distribution may lie below 1 / 256.
        certain = np.ones(self.hashes + 1)
        return np.divide(below - impossible, 1 - impossible, out=certain, where=impossible < 1)


def _equal(similarity: float) -> float:
    return similarity + (1 - similarity) * _CHANCE


def _beta_cdf(at: float, trials: int) -> np.ndarray:
    """Returns float64[trials + 1], the probability that Beta(k + 1, trials - k + 1) is below `at`.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.5.24: the chance of more
    than k successes in trials + 1, each of chance `at`.
    """
    if at >= 1:
        return np.ones(trials + 1)
    drawn = trials + 1
    successes = np.arange(drawn + 1)
    factorials = np.array([math.lgamma(each + 1) for each in range(drawn + 1)])
    logarithms = factorials[-1] - factorials - factorials[::-1]
    logarithms += successes * math.log(at) + (drawn - successes) * math.log1p(-at)
    return np.cumsum(np.exp(logarithms)[::-1])[-2::-1].clip(0, 1)


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything a worker needs."""

    folder: str  # folder of the list and the stages' files
    corpora: dict[str, sources.Corpus]  # by name, "" for the only one
    rules: Rules
    contaminated: bool  # whether the folder has n-grams of evaluation sets
    hf_token_secret: str = ""  # name of the secret with the Hub's token, or ""
    # SHA-256 of each corpus's lists, copied to the folder, whose documents are not read.
    exclude: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def pieces(self) -> list[tuple[str, sources.Piece]]:
        """All pieces in order, each with the name of its corpus."""
        return [(name, piece) for name, each in self.corpora.items() for piece in each.pieces]

    def salt(self, name: str) -> np.uint64:
        """Returns what tells ids of different corpora apart when equal ids are looked for."""
        return np.uint64(list(self.corpora).index(name) * 0x9E3779B97F4A7C15 % 2**64)

    def path(self, stage: str, number: int) -> str:
        return files.join(self.folder, f"{stage}-{number:05d}.arrays")


def record(
    corpora: Mapping[str, sources.Corpus],
    rules: Rules,
    against: list[dict[str, Any]],
    shard_bytes: int,
    exclude: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Returns, as JSON, everything that determines the list and the stages' files."""
    records = {
        name: {key: each for key, each in corpus.record.items() if key != "left_out"}
        for name, corpus in corpora.items()
    }
    return {
        **({"exclude": list(exclude)} if exclude else {}),
        "format": FORMAT,
        "shard_bytes": shard_bytes,
        **({"corpus": records[""]} if "" in records else {"corpora": records}),
        "rules": dataclasses.asdict(rules),
        "against": against,
        "unicode": unicodedata.unidata_version,
    }


def partitions(units: int) -> int:
    """Returns the number of key partitions for `units`, a power of two."""
    wanted = max(1, -(-units // _PARTITION))
    return min(PREFIXES, 1 << (wanted - 1).bit_length())
