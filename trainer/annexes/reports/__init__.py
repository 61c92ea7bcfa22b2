"""Pages about runs: curves, tables, rows by loss, samples."""
