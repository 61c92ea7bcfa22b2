"""Verification of finished caches: the files of the whole cache, and each shard."""
