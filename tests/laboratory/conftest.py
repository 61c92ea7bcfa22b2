"""The cache and the corpus of the trainer's tests."""

from tests.trainer.conftest import many_shards, text_cache

__all__ = ["many_shards", "text_cache"]
