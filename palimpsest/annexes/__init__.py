"""Annexes: see tasks/annexes.py."""
