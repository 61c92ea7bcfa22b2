"""A worker's memory does not depend on the sizes of documents, lines and files."""

import time

import pytest

from tests.support.parameters import slow_unless

pytestmark = pytest.mark.processes

WORDS = "these are words and more of them, one after the other and never the same number 12345 "
SMALL = WORDS * 10


def write(path, form: str, long_bytes: int) -> None:
    """Yields a short document, one of `long_bytes`, and a short one."""
    long = WORDS * (long_bytes // len(WORDS))
    if form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": [SMALL, long, SMALL]}), path)
        return
    before, after = ('{"text": "', '"}') if form == "json" else ("", "")
    path.write_text("".join(f"{before}{text}{after}\n" for text in (SMALL, long, SMALL)))


def peak_of(process) -> int:
    """Waits for a process to end; returns its peak memory in MiB."""
    peak = 0
    while process.poll() is None:
        with open(f"/proc/{process.pid}/status") as file:
            peak = max([peak, *(int(s.split()[1]) >> 10 for s in file if s.startswith("VmHWM"))])
        time.sleep(0.02)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return peak


@pytest.mark.parametrize("tokenizer", slow_unless({"fast"}, ["fast", "sentencepiece"]))
def test_a_line_of_20_mb(start, tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", "json", 20_000_000)
    spec = f"--corpus=json:{tmp_path}/a.jsonl?validation=0"
    assert peak_of(start(tmp_path / "c", spec, f"--tokenizer={tokenizer}")) < 500


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["fast", "sentencepiece"])
@pytest.mark.parametrize(
    # A line of JSON has a limit; Arrow holds two to three copies of a Parquet value as it reads.
    ("form", "most"),
    [("text", 600), ("parquet", 1200)],
)
def test_a_document_of_200_mb(start, tmp_path, form, most, tokenizer):
    path = tmp_path / f"a.{form}"
    write(path, form, 200_000_000)
    spec = f"--corpus={form}:{path}?validation=0"
    assert peak_of(start(tmp_path / "c", spec, f"--tokenizer={tokenizer}")) < most
