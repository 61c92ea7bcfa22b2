"""Dry runs: the size, time and price of a build, estimated from a sample."""
