"""An objective: the targets are the inputs from back to front."""

import dataclasses

import numpy as np

from tasks.objectives import Lengths, Objective, with_eos
from tasks.task import TaskSpec


@dataclasses.dataclass(frozen=True)
class Reversal(Objective):
    """The targets are the inputs from back to front."""

    features = ("inputs", "targets")
    appends_eos = True

    def window_tokens(self, lengths):
        return min(lengths.inputs, lengths.targets) - 1

    def sentinels(self, lengths):
        return 0

    def examples(self, tokens_WN, lengths_W, keys_W, lengths, ids):
        places_N = np.arange(tokens_WN.shape[1])
        from_end_WN = np.maximum(lengths_W[:, None] - 1 - places_N, 0)
        return {
            "inputs": with_eos(tokens_WN, lengths_W, ids),
            "targets": with_eos(np.take_along_axis(tokens_WN, from_end_WN, 1), lengths_W, ids),
        }


DNA_REVERSAL = TaskSpec("dna_reversal", "", Reversal(), Lengths(32, 32))
