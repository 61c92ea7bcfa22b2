"""Comparisons of models; each is one command built from the project's own commands."""
