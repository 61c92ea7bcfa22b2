"""Vocabularies compared on the same texts."""
