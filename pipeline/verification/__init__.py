"""Verification of finished caches: shared files and each shard."""
