"""A worker's memory does not depend on the sizes of documents, lines and files."""

import time

import pytest

from tests.support.corpora import write_json
from tests.support.parameters import slow_unless

pytestmark = pytest.mark.processes

WORDS = "these are words and more of them, one after the other and never the same number 12345 "
SMALL = WORDS * 10


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
    texts = (SMALL, WORDS * (20_000_000 // len(WORDS)), SMALL)
    write_json(tmp_path / "a.jsonl", texts)
    spec = f"--corpus=json:{tmp_path}/a.jsonl?validation=0"
    assert peak_of(start(tmp_path / "c", spec, f"--tokenizer={tokenizer}")) < 500
