"""Checkpoints of T5X and Mesh TensorFlow, and T5X as the engine of a run."""
