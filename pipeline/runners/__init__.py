"""Beam runners: options, local workers, portable worker pools, Dataflow."""
