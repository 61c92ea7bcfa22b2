"""Recipes: all stages from a corpus to a model in one file; each stage is one of our commands."""
