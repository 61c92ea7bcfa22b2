"""Corpora: which files a SPEC names, how they are split, and how documents are read."""
