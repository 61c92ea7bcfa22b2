"""Layouts of block-sparse attention."""
