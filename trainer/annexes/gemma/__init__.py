"""Families, presets and cross-attention of Gemma and T5Gemma."""
