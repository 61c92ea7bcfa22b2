"""Rows that dry_runs adds to tables of the core's tests."""


def _workers(corpus, folder):
    return ["pipeline.build", "--task=lm", "--name=x", f"--corpus=text:{corpus}", "--dry_run",
            "--vocabulary=bytes", f"--cache_dir={folder}/cache", "--workers=2"]  # fmt: skip


PARENTS = {"workers of a dry run": _workers}
