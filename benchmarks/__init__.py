"""Benchmarks; results are ratios measured in one run on one machine (benchmarks/README.md)."""
