"""Checkpoints of a run, their metadata, and the state of early stopping."""
