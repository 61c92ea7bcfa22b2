"""Runs as models of the Language Model Evaluation Harness."""
