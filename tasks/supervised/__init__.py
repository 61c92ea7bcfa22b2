"""Supervised tasks in T5's format: rows of a data set as text to text."""
