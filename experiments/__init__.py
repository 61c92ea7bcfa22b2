"""Comparisons of models, each of which is one command built from the project's own commands."""
