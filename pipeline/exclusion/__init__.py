"""Exclude lists: documents and paragraphs that a build leaves out, and why."""
