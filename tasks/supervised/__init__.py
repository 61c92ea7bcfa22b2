"""Supervised tasks as T5 formats them: rows of a data set as text to text."""
