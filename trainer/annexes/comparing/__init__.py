"""Finds the first difference between two runs: in configuration, data, steps or tensors."""
