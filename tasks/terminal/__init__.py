"""Command lines: flags, help, one-line errors, tables, progress bars."""
