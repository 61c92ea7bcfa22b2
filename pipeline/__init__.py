"""From a corpus to a cache: Beam jobs that tokenize and pack. Never imports trainer or JAX."""
