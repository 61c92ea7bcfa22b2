"""Rows that comparing adds to tables of the core's tests."""

ON_RUNS = [("trainer.annexes.comparing.explain", "--step=1")]
