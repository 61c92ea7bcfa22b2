"""Batches in PyTorch; `palimpsest.torch` is the module `loader`."""
