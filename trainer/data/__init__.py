"""Makes batches from caches: batch k is a function of the configuration and k. Needs no JAX."""
