"""Suites of questions, answered by likelihoods, and gaps filled by text."""
