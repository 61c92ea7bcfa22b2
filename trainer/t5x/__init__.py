"""Reads and writes T5X's checkpoint formats, and trains with T5X."""
