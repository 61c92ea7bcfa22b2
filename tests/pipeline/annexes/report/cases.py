"""Rows that report adds to tables of the core's tests."""

ON_CACHES = [("pipeline.annexes.report.report", "--output={folder}/report.html")]
