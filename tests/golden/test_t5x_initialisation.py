"""`init_params` draws T5X's initial parameters from T5X's key.

Held against the arrays kept in this folder only: which key made which model is known of those.
"""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.compiled import compiled
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params

OWN_ARRAYS = Path(__file__).parent / "reference"
# The models were made one after the other, each with the next seed.
SEED_OFFSETS = {"encdec_untied": 0, "encdec_tied": 1, "lm_tied": 2, "lm_untied": 3}


def test_initial_parameters(array_set, reference):
    if reference.folder != OWN_ARRAYS:
        pytest.skip("the keys of another reference are not known")
    key = jax.random.PRNGKey(array_set.meta["config"]["seed"] + SEED_OFFSETS[array_set.name])
    ours = compiled(partial(init_params, model_spec(array_set.config)))(key)
    compared = 0
    for path, expected in jax.tree_util.tree_leaves_with_path(array_set.params):
        names = [entry.key for entry in path]
        if names[-1] == "scale":  # replaced in the reference, so that they matter
            continue
        actual = ours
        for name in names:
            actual = actual[name]
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=str(names))
        compared += 1
    assert compared > 0
