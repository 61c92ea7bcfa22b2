"""Beam jobs that tokenize and pack a corpus into a cache. Never imports trainer or JAX."""

import os

import palimpsest_home

palimpsest_home.settle(__path__[0])
# Arrow's allocator reads this when it is loaded. Otherwise it gives free pages back to the system
# while a batch is encoded, which took a sixth of a build's processor time.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

__all__: list[str] = []  # its commands are public
