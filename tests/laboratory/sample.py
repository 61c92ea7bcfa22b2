"""One call of the laboratory, for tests."""

import sys

from tests.support.processes import completed


def sample(folder, *words):
    """Runs the laboratory; returns its exit code, what it counted, and its output."""
    command = [sys.executable, "-m", "tests.laboratory", *words, "--seed=5", "--jobs=1"]
    done = completed([*command, f"--output={folder}"])
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines() if line[:2] == "| "]
    counts = {row[0].strip(): int(row[1]) for row in rows if row[1].strip().isdigit()}
    return done.returncode, counts, done.stdout + done.stderr
