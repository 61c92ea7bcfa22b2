"""Byte-level BPE and WordPiece vocabularies."""
