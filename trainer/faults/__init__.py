"""Fault injection: kills runs, the builds that they follow, and damages checkpoints."""
