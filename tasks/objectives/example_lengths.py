"""Kinds of examples whose lengths are known before tokens are read."""

from typing import NamedTuple

import numpy as np


class Kind(NamedTuple):
    """A kind of example, or of two examples whose lengths add up to a constant.

    Attributes:
      share: weight of its examples among all examples.
      choice: number of the kind in its objective.
      members: examples packed into one row together, 1 or 2; the second mirrors the first.
      inputs, targets: total lengths of these examples, EOS included.
    """

    share: float
    choice: int
    members: int
    inputs: int
    targets: int


class Slots(NamedTuple):
    """The kinds of examples that windows become.

    Attributes:
      choices_W: int64 [W], numbers of kinds.
      mirrored_W: bool [W], True for an example that mirrors the previous one and has its key.
    """

    choices_W: np.ndarray
    mirrored_W: np.ndarray
