"""Rows that inspecting adds to tables of the core's tests."""

ON_CACHES = [("tasks.annexes.inspecting.inspect", "--index=3")]
