"""Shared by pipeline and trainer: corpora, vocabularies, tasks, noise and the cache format.

Imports no Beam, TensorFlow or JAX at module level.
"""

import palimpsest_home

palimpsest_home.settle(__path__[0])

__all__ = [
    "adapters",
    "metrics",
    "mixture",
    "objectives",
    "reading",
    "task",
    "vocabulary",
]
