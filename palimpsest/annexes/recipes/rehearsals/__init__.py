"""Rehearsals of recipes: all stages in minutes, on samples of the corpora and with small models."""
