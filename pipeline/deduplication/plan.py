"""The parameters of a search for duplicates, and the files of its folder."""

import dataclasses
import math
import unicodedata
from typing import Any

import numpy as np

from tasks.reading import sources
from tasks.storage import files

PLAN = "plan.json"
REPORT = "report.json"
LIST = "exclude.arrow"
GRAMS = "grams.arrays"
# Files of the stages, which are deleted once the list is written.
SIGNATURES, EDGES = "signatures", "edges"
STAGES = (SIGNATURES, EDGES)

DOCUMENT, PARAGRAPH = "document", "paragraph"
UNITS = (DOCUMENT, PARAGRAPH)
NEAR, EXACT, NONE = "near", "exact", "none"
DUPLICATES = (NEAR, EXACT, NONE)
# Parts into which sorted keys are indexed, by their first byte.
PREFIXES = 256
# A partition of the keys has about so many units, up to 67 million units; more have 256 partitions.
_PARTITION = 1 << 18
# Probability that 8 bits of two different MinHash values are equal.
_CHANCE = 1 / 256


@dataclasses.dataclass(frozen=True)
class Rules:
    """The criteria by which a unit is a duplicate or contaminated.

    Attributes:
      unit: one of UNITS.
      duplicates: one of DUPLICATES.
      bands, rows: bands of MinHash values, and values a band.
      shingle: words of a shingle.
      min_words: units of fewer words are never listed.
      min_similarity: least estimated similarity of near duplicates, 0 for any that share a band.
      ngram: words of an n-gram that is shared with an evaluation set.
      share: least share of an example's n-grams that makes a unit contaminated, 0 for one n-gram.
      common: n-grams in more units than this are ignored, 0 for none.
    """

    unit: str
    duplicates: str
    bands: int
    rows: int
    shingle: int
    min_words: int
    min_similarity: float
    ngram: int
    share: float
    common: int

    @property
    def near(self) -> bool:
        """True if near duplicates are looked for besides exact ones."""
        return self.duplicates == NEAR

    @property
    def hashes(self) -> int:
        """Number of MinHash values of a unit."""
        return self.bands * self.rows

    @property
    def threshold(self) -> float:
        """The similarity at which the curve of `probability` is steepest: (1 / bands)^(1 / rows).

        Source: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2.
        """
        return (1 / self.bands) ** (1 / self.rows)

    @property
    def wanted(self) -> float:
        """The similarity from which a pair counts as a near duplicate in reports."""
        return self.min_similarity or self.threshold

    def probability(self, similarity: float) -> float:
        """Returns the probability that a pair of this Jaccard similarity shares a band."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def least_equal(self) -> int:
        """Returns the fewest equal signature values of a pair of `min_similarity`."""
        if not self.min_similarity:
            return 0
        return max(1, round(_equal(self.min_similarity) * self.hashes))

    def estimate(self, equal: Any) -> Any:
        """Returns the estimated Jaccard similarity of pairs with so many equal values of 8 bits.

        Source: Li and König 2010, "b-Bit Minwise Hashing" (arXiv:0910.3349), section 2.
        """
        return ((equal / self.hashes - _CHANCE) / (1 - _CHANCE)).clip(0, 1)

    def unlike(self) -> np.ndarray:
        """Returns float64[hashes + 1], the probability that a pair is less similar than `wanted`.

        Item k is for pairs of which k of the signature's values are equal, if all similarities are
        as likely before these are known. A pair of similarity s has k with the binomial
        probability of k of `hashes` at s + (1 - s) / 256, so what k tells of that share is a Beta
        distribution of k + 1 and hashes - k + 1, above 1 / 256.
        """
        below, impossible = (
            _beta_cdf(share, self.hashes) for share in (_equal(self.wanted), _CHANCE)
        )
        # Of many values, so few are never equal that the distribution lies below 1 / 256 entirely.
        certain = np.ones(self.hashes + 1)
        return np.divide(below - impossible, 1 - impossible, out=certain, where=impossible < 1)


def _equal(similarity: float) -> float:
    """Returns the share of equal signature values that is expected of a pair."""
    return similarity + (1 - similarity) * _CHANCE


def _beta_cdf(at: float, trials: int) -> np.ndarray:
    """Returns, for each k, the chance of more than k successes in trials + 1, each of chance `at`.

    This is float64 [trials + 1], the probability that Beta(k + 1, trials - k + 1) is below `at`.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.5.24.
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
    """Everything a worker needs.

    Attributes:
      folder: folder of the list and of the stages' files.
      corpus: the resolved corpus.
      rules: what makes a duplicate.
      contaminated: whether the folder has n-grams of evaluation sets.
      hf_token_secret: name of the secret with the Hub's token, "" for none.
      exclude: SHA-256 of the lists, copied to the folder, whose documents are not read.
    """

    folder: str
    corpus: sources.Corpus
    rules: Rules
    contaminated: bool
    hf_token_secret: str = ""
    exclude: tuple[str, ...] = ()

    def path(self, stage: str, number: int) -> str:
        """Returns the path of a stage's file."""
        return files.join(self.folder, f"{stage}-{number:05d}.arrays")


def record(
    corpus: sources.Corpus,
    rules: Rules,
    against: list[dict[str, Any]],
    shard_bytes: int,
    exclude: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Returns all that the list depends on, and the files of the stages, as JSON."""
    return {
        **({"exclude": list(exclude)} if exclude else {}),
        "format": 1,
        "shard_bytes": shard_bytes,
        "corpus": {key: each for key, each in corpus.record.items() if key != "left_out"},
        "rules": dataclasses.asdict(rules),
        "against": against,
        "unicode": unicodedata.unidata_version,
    }


def partitions(units: int) -> int:
    """Returns the number of partitions of the keys of so many units, a power of two."""
    wanted = max(1, -(-units // _PARTITION))
    return min(PREFIXES, 1 << (wanted - 1).bit_length())
