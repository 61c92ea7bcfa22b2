"""The cache of the trainer's tests."""

from tests.trainer.conftest import text_cache as text_cache
