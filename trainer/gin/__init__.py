"""Gin files of T5X and of Mesh T5, read as data and never executed."""
