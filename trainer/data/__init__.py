"""Makes batches from caches: batch k is a function of the configuration and k. No JAX."""
