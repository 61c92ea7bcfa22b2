"""Annexes, each of which can be deleted (see tasks/annexes/__init__.py)."""
