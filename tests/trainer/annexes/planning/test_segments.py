"""Planned batches of segments."""

import jax
import numpy as np
import pytest

from tests.trainer.data.test_segments import SHAPES, makers
from tests.trainer.data.test_segments import cache as cache
from trainer.annexes.planning.planned_run import Subject
from trainer.config import Config, DataConfig
from trainer.config.presets import model_preset


@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_has_the_features_of_segments(cache, name):
    _, maker = makers(cache, name)
    objective, model, _ = SHAPES[name]
    config = Config(SHAPES[name][1], model_preset(model), data=DataConfig(segment_documents=True))
    planned = Subject(config, maker.converter, frozenset(objective.features)).row()
    batch = maker.blank()
    assert jax.tree.map(np.shape, planned) == jax.tree.map(np.shape, batch)
