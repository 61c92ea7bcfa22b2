"""Gin files of Mesh T5 and Primer, read as data and never executed."""
