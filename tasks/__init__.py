"""What pipeline and trainer share: corpora, vocabulary, tasks, noise, and the format of a cache.

Nothing here imports Beam, TensorFlow or JAX at module level; only `seqio_tasks` imports seqio.
"""
