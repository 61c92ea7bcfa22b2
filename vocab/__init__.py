"""Trains, measures and trims vocabularies."""

import palimpsest_home

palimpsest_home.settle(__path__[0])

__all__: list[str] = []  # its commands are public
