"""Parts, families and presets of Primer and the models compared with it."""
