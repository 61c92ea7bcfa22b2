"""Trains SentencePiece vocabularies on text corpora."""
