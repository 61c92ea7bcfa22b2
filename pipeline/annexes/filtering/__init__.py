"""Filters of a build: edits of texts, verdicts with reasons, and the published sets of rules."""
