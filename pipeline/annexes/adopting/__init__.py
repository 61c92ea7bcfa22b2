"""Adoption of other programs' caches: finding, scanning and indexing their files."""
