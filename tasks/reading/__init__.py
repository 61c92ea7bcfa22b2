"""Corpora: finds the files that a SPEC names, splits them and reads their documents."""
