"""The cache of the trainer's tests."""

from tests.trainer.conftest import text_cache

__all__ = ["text_cache"]
