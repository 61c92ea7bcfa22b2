"""Kinds of examples whose lengths are known before tokens are read."""

from typing import NamedTuple

import numpy as np


class Kind(NamedTuple):
    """A kind of example, or of two examples whose lengths add up to a constant."""

    share: float  # weight of its examples among all examples
    choice: int  # number of the kind in its objective
    members: int  # examples packed into one row together, 1 or 2; the second mirrors the first
    # inputs, targets: total lengths of these examples, EOS included.
    inputs: int
    targets: int


class Slots(NamedTuple):
    """The kinds of examples that windows become."""

    choices_W: np.ndarray  # int64 [W], numbers of kinds
    # bool [W], True for an example that mirrors the previous one and has its key.
    mirrored_W: np.ndarray
