"""Measures the speed of each set of filters, beside datatrove's filters of the same rules.

    python -m benchmarks.filters --corpus='parquet:text.parquet' --datatrove_python=VENV/bin/python

One process reads the corpus into batches, and each set judges them several times; the fastest time
counts. MB are 10^6 bytes of text, by processor time. datatrove judges at most --their_bytes, and
splits words at spaces, because its own splitter needs a library for each language.
"""

import json
import subprocess
import tempfile
import time

import pyarrow as pa

from benchmarks.dedup import documents
from benchmarks.machine import machine
from pipeline.filtering import sets
from pipeline.filtering.edits import EDITS
from pipeline.filtering.stages import verdicts
from pipeline.filtering.statistics import Statistics
from tasks.terminal.command_line import Parser, positive
from tasks.terminal.table import table

_GIVEN = (
    *("gopher_quality", "gopher_repetition", "gopher", "c4", "fineweb", "pii"),
    *("script?scripts=latin", "gopher,c4,fineweb,pii"),
)
_BATCH = 1024
_REPEATS = 3
_THEIRS = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter)
import datatrove.utils.text as text
class Spaces:
    def word_tokenize(self, text): return text.split()
    def sent_tokenize(self, text): return text.split(". ")
for module in [m for name, m in sys.modules.items() if name.startswith("datatrove")]:
    for name in ("split_into_words", "split_into_sentences"):
        if hasattr(module, name):
            how = str.split if name.endswith("words") else (lambda t: t.split(". "))
            setattr(module, name, lambda t, *_, how=how, **__: how(t))
documents = [Document(text=each, id="x") for each in json.load(open(sys.argv[1]))]
for name, made in (("gopher_quality", GopherQualityFilter), ("gopher_repetition",
        GopherRepetitionFilter), ("c4", C4QualityFilter), ("fineweb", FineWebQualityFilter)):
    try:
        judge = made()
        begin = time.process_time()
        for each in documents:
            judge.filter(each)
        print(json.dumps([name, time.process_time() - begin]))
    except Exception as error:
        print(json.dumps([name, repr(error)[:200]]))
"""


def _seconds(given: str, batches: list[pa.LargeStringArray]) -> float:
    records = sets.resolve([given], None) or ()
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.process_time()
        for texts in batches:
            for record in records:
                if record.name in EDITS:
                    texts, _ = EDITS[record.name](texts, record.settings)
            statistics = Statistics(texts)
            for record in records:
                list(verdicts(record, statistics))
        best = min(best, time.process_time() - begin)
    return best


def main() -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.filters", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--corpus", default="python_docs", help="corpus SPEC")
    add("--datatrove_python", help="interpreter of an environment with datatrove")
    add("--their_bytes", type=positive, default=4 << 20, help="bytes of text for datatrove")
    flags = parser.parse_args()
    print(machine())
    texts = [text for _, text in documents(flags.corpus) if text]
    size = sum(len(text.encode()) for text in texts)
    batches = [
        pa.array(texts[begin : begin + _BATCH], pa.large_string())
        for begin in range(0, len(texts), _BATCH)
    ]
    _seconds(_GIVEN[-1], batches[:1])  # compiles
    speeds = {given: size / 1e6 / _seconds(given, batches) for given in _GIVEN}
    theirs: dict[str, str] = {}
    if flags.datatrove_python:
        some, their_size = [], 0
        for text in texts:
            some.append(text)
            their_size += len(text.encode())
            if their_size > flags.their_bytes:
                break
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(some, file)
            file.flush()
            command = [flags.datatrove_python, "-c", _THEIRS, file.name]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in out.splitlines():
            name, seconds = json.loads(line)
            is_time = isinstance(seconds, float)
            theirs[name] = f"{their_size / 1e6 / seconds:.2f}" if is_time else seconds
    rows = [(given, f"{speed:.1f}", theirs.get(given, "")) for given, speed in speeds.items()]
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB")
    print(table(("filters", "MB/s per core", "datatrove, MB/s"), rows, markdown=True))


if __name__ == "__main__":
    main()
