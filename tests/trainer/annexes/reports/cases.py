"""Rows that reports adds to tables of the core's tests."""

ON_RUNS = [("trainer.annexes.reports.report",)]
