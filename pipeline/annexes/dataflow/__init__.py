"""Builds on Google Cloud Dataflow, by Beam."""
