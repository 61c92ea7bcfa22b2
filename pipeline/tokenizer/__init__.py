"""Computes the ids of SentencePiece and `tokenizers` in compiled code."""
