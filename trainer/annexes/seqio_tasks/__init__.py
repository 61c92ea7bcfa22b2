"""Data of tasks that are registered with seqio, and our tasks registered there."""
