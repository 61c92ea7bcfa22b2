"""The trainer: from a cache of packed rows to checkpoints of a pretrained model."""

__all__ = ["config", "decoding", "model"]
