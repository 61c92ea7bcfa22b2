"""Duplicates and contamination of a corpus: signatures, shared keys, clusters, exclude list."""
