"""Beam jobs that tokenize and pack a corpus into a cache. Never imports trainer or JAX."""

__all__: list[str] = []  # its commands are public
