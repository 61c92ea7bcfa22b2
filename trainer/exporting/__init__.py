"""Export of a run's checkpoint to transformers."""
