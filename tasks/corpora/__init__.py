"""Families of tasks, a file for each corpus."""
