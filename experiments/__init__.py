"""Comparisons of models: each is one command, made of the project's own."""
