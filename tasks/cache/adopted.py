"""Caches of other programs, indexed by an annex and read in place.

The records stay unchanged; these files are added, the first two for each file of records:

    train.rows-00003-of-00016.npy         row index
    train.receipt-00003-of-00016.json     sizes, checksums and counts of a file and its index
    sentencepiece.model                   the vocabulary, if it was given
    manifest.json                         written last
"""

import dataclasses

import numpy as np

SEQIO, MEGATRON = "seqio", "megatron"
PROGRAMS = (SEQIO, MEGATRON)

# The row index of texts whose rows have any length. `offset`: bytes from the start of the file to
# the row; `begin`: number of tokens in the file's earlier rows; `tokens`: number in the row.
RAGGED_INDEX = np.dtype([("offset", "<u8"), ("begin", "<u8"), ("tokens", "<u4")])


@dataclasses.dataclass(frozen=True)
class Adoption:
    """Another program's cache, as part of a plan."""

    program: str  # one of PROGRAMS
    folder: str  # folder of the records; "" for the folder of the manifest
    token: str  # numpy dtype name of a token in Megatron files; "" for seqio
    sha256: str  # digest of the names, sizes and checksums of all record files


@dataclasses.dataclass(frozen=True)
class AdoptedCounts:
    """Counts for one file of another program's records."""

    empty: int  # number of rows without targets
    zeros: int  # number of zero ids, which are read as padding
    ids: int  # the highest id plus one; 0 if there are no ids
    # inputs_ends, targets_ends: number of rows in which that side ends in an EOS, which the token
    # counts of pairs leave out.
    inputs_ends: int
    targets_ends: int
