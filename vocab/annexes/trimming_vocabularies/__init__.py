"""Vocabularies cut to the pieces of a text."""
