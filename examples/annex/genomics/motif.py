"""An evaluation: how likely the model finds it that a sequence is reversed."""

import numpy as np

from trainer.evaluating.likelihood import Likelihood


class Motif:
    """Made once for a run whose settings `motif` are on, and called at each evaluation."""

    def __init__(self, run, program):
        ids = np.array(run.data.encode(run.config.motif.sequence), np.int32)
        self._program, self._pairs = program, [(ids, ids[::-1])]
        self._likelihood = Likelihood(program, run.converter, program.mesh.size)

    def __call__(self, params, name, stopping):
        (found,) = self._likelihood(self._program.merged(params), self._pairs)
        return {"motif": {"log_likelihood": float(found)}}
