"""Tiny models, as the tests of the core's parts have them."""

from tests.trainer.model.conftest import build as build
from tests.trainer.model.conftest import make_config as make_config
