"""Trained runs, opened to be used: their text, their samples, and the functions that they are."""
