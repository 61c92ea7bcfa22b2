"""Adoption of other programs' caches: finding their files, scanning them and writing an index."""
