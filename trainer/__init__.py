"""The trainer: from a cache of packed rows to checkpoints of a pretrained model."""

import palimpsest_home

palimpsest_home.settle(__path__[0])

__all__ = ["config", "data", "decoding", "model", "reading"]
