"""Beam jobs that tokenize and pack a corpus into a cache. Never imports trainer or JAX."""
