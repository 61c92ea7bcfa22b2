"""Annexes: see tasks/annexes/__init__.py."""
