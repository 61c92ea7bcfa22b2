"""Trained runs, opened for use: as functions from text to text, and for reports."""
