"""Kinds of vocabularies: each module reads the pieces of one kind, and encodes its text."""
