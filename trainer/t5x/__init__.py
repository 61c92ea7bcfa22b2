"""T5X: its checkpoints read and written, and T5X itself as the engine of a run."""
