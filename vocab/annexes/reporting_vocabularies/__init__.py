"""How well a vocabulary fits corpora."""
