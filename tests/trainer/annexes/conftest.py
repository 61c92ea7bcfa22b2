"""Tiny models and their batches, as the tests of the core's parts have them."""

from tests.trainer.model.conftest import batch as batch
from tests.trainer.model.conftest import make_config as make_config
from tests.trainer.model.conftest import make_tiny as make_tiny
from tests.trainer.model.conftest import packed as packed
