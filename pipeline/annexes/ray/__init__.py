"""Builds on Ray."""
