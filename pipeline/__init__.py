"""Beam jobs that tokenize and pack a corpus into a cache. Never imports trainer or JAX."""

import palimpsest_home

palimpsest_home.settle(__path__[0])

__all__: list[str] = []  # its commands are public
