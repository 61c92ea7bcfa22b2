"""Trains SentencePiece vocabularies on text corpora."""

__all__: list[str] = []  # its commands are public
