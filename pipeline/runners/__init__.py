"""Engines by name, workers of this machine, parts of a job, and secrets."""
