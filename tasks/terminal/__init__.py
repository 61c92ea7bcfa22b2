"""Command lines: flags, help, errors as one line, progress bars."""
