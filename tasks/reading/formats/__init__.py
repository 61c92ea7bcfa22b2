"""File formats of corpora: one class per format, listed in `registry`."""
