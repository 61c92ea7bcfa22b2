"""Builds on Apache Spark."""
