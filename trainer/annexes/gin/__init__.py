"""Gin files, read as data and never executed; T5X's own are understood here."""
