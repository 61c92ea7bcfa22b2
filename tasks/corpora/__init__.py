"""Families of tasks: one file per corpus."""
