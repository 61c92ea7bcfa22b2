"""From a cache to batches: batch k is a function of the configuration and k. No JAX."""
