"""T5X's checkpoint formats: reading and writing."""
