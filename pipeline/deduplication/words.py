"""Words of batches of documents, as hashes."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.deduplication import kernels
from pipeline.tokenizer.fast_tokenizer import buffers
from tasks.unit import SIDES


class Words:
    """Hashes of words and texts; each call overwrites the buffer."""

    def __init__(self) -> None:
        self._table = kernels.character_table()
        self._words = np.empty(0, np.uint64)

    def __call__(
        self, data: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (words' hashes, their bounds, exact hashes), see `kernels.words_of`."""
        if len(self._words) < len(data) + len(begins):
            self._words = np.empty(len(data) + len(begins), np.uint64)
        bounds = np.zeros(len(begins) + 1, np.int64)
        exact = np.empty((len(begins), 2), np.uint64)
        kernels.words_of(data, begins, ends, self._table, self._words, bounds, exact)
        return self._words, bounds, exact


def text_bytes(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint8 bytes, int64[texts + 1] bounds) of texts, or of pairs with joined sides."""
    if "text" in batch.schema.names:
        texts = batch.column("text")
    else:
        sides = (batch.column(side).cast(pa.large_string()).fill_null("") for side in SIDES)
        texts = pc.binary_join_element_wise(*sides, pa.scalar("\n", pa.large_string()))
    return buffers(texts.cast(pa.large_string()).fill_null(""))
