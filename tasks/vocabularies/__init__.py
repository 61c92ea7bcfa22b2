"""Kinds of vocabularies, a file each: how their pieces are read, and which library encodes text."""
