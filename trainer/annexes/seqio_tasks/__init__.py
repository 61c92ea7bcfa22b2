"""Data of tasks that are registered with seqio."""
