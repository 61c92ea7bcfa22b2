"""Attention, and statistics of logits, in Pallas kernels for TPUs and GPUs."""
