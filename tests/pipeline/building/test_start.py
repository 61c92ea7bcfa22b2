"""A build of local files starts at once: it imports nothing that it does not need."""

import sys

import pyarrow as pa
from pyarrow import parquet

from tests.support.processes import completed

BUILD = """
import sys
from pipeline.build import main
main(sys.argv[1:])
print("imported", *sys.modules)
"""
HEAVY = {"apache_beam", "datasets", "grpc", "numba", "pandas", "tokenizers"}
HEAVY |= {"jax", "seqio", "tensorflow"}


def test_nothing_heavy_is_imported(flags, tmp_path):
    # The second is split when read, some are held out, and the last is left out.
    texts = ["a text " * 9, "words " * 200_000, *["more words"] * 50, ""]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    given = flags(tmp_path, f"--corpus=parquet:{tmp_path}/a.parquet?validation=0.2")
    done = completed([sys.executable, "-c", BUILD, *given])
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert "pyarrow.parquet" in imported
    assert not imported & HEAVY
