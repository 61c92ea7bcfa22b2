"""Observers of a run: its wall time, hangs, and a command for events."""
