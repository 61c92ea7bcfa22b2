"""Trains, measures and trims vocabularies."""

__all__: list[str] = []  # its commands are public
