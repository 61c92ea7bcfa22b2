"""Evaluation of a split: losses, generated text and its metrics."""
