"""Everything that pipeline and trainer share: corpora, vocabulary, tasks, noise, the cache format.

Nothing here imports Beam, TensorFlow or JAX at module level; only `seqio_tasks` imports seqio.
"""

__all__ = [
    "adapters",
    "metrics",
    "mixture",
    "objectives",
    "reading",
    "seqio_tasks",
    "task",
    "vocabulary",
]
