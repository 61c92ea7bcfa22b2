"""Measures how many planted duplicates palimpsest dedup finds, and its speed beside datatrove's.

    python -m benchmarks.dedup --corpus='parquet:text.parquet' --datatrove_python=VENV/bin/python

Planted pairs are passages of the corpus and copies that end in a different passage; their Jaccard
similarity over shingles of 5 words is computed with plain Python strings. The table has the share
of pairs found at each similarity beside the probability that MinHash predicts.

For speed, every row is a command on the corpus itself: MB, 10^6 bytes of text, per processor second
of all its processes, less the time for 20 documents. datatrove runs only its first stage, the
signatures, with FineWeb's parameters; VENV has `datatrove regex spacy tokenizers xxhash<4`. "split
at spaces" leaves out spaCy, its word tokenizer.
"""

import dataclasses
import itertools
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.build import cost_of
from benchmarks.machine import machine
from pipeline.annexes.deduplication import dedup
from pipeline.annexes.deduplication.options import Options
from pipeline.excluding.lists import EXACT, ExcludeList, id_digests
from tasks.reading import sources
from tasks.terminal.command import Command
from tasks.terminal.fields import at_least, field
from tasks.terminal.table import table

SHINGLE = 5
PASSAGE = 150  # words in a passage
LEVELS = tuple(level / 100 for level in range(50, 100, 5))

_DATATROVE = """
import json, sys, tempfile, time
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
path, split = sys.argv[1:]
rows = [json.loads(line) for line in open(path)]
config = MinhashConfig(
    n_grams=5, num_buckets=14, hashes_per_bucket=8,
    hash_config=HashConfig(precision=64, hash_fc="xxhash"),
)
class Split:
    def word_tokenize(self, text):
        return text.split()
with tempfile.TemporaryDirectory() as folder:
    stage = MinhashDedupSignature(output_folder=folder, config=config, language="eng")
    if split == "split":
        stage.word_tokenizer = Split()
    else:
        stage.word_tokenizer.word_tokenize("load it")
    begin = time.process_time()
    stage.run((Document(text=row["text"], id=row["id"]) for row in rows), 0, 1)
    print(time.process_time() - begin)
"""


def words_of(text: str) -> list[str]:
    """Returns the words of a text as the command defines them, using regular expressions."""
    return re.findall(r"[^\W_]+", text.lower())


def shingles(words: list[str]) -> set[tuple[str, ...]]:
    """Returns all shingles of a list of words."""
    return {tuple(words[at : at + SHINGLE]) for at in range(len(words) - SHINGLE + 1)}


def documents(corpus: str) -> Iterator[tuple[str, str]]:
    """Yields the (id, text) of each document in a corpus."""
    resolved = sources.resolve(sources.parse(corpus))
    for piece in resolved.pieces:
        for _, batch in sources.read(resolved, piece):
            yield from zip(
                batch.column("id").to_pylist(), batch.column("text").to_pylist(), strict=True
            )


def passages(corpus: str, wanted: int) -> list[list[str]]:
    """Returns up to `wanted` passages of words that share no shingle with one another."""
    known: set[tuple[str, ...]] = set()
    found: list[list[str]] = []
    for _, text in documents(corpus):
        words = words_of(text or "")
        for start in range(0, len(words) - PASSAGE, PASSAGE):
            passage = words[start : start + PASSAGE]
            mine = shingles(passage)
            if not mine & known and len(mine) > PASSAGE // 2:
                known |= mine
                found.append(passage)
                if len(found) == wanted:
                    return found
    return found


def plant(found: list[list[str]], per_level: int) -> tuple[dict[str, str], dict[str, float]]:
    """Returns id -> text, and id of a planted copy -> its true similarity to the original."""
    texts: dict[str, str] = {}
    true: dict[str, float] = {}
    generator = random.Random(0)
    generator.shuffle(found)
    free = iter(found)
    for level, number in itertools.product(LEVELS, range(per_level)):
        pair = tuple(itertools.islice(free, 2))
        if len(pair) < 2:
            break
        original, other = pair
        kept = round(2 * level / (1 + level) * (PASSAGE - SHINGLE + 1)) + SHINGLE - 1
        copy = [*original[:kept], *other[: PASSAGE - kept]]
        first, second = shingles(original), shingles(copy)
        name = f"{level}/{number}"
        texts[f"original {name}"], texts[f"copy {name}"] = " ".join(original), " ".join(copy)
        true[f"copy {name}"] = len(first & second) / len(first | second)
        if not number % 4:
            texts[f"same {name}"] = "  \n" + " ".join(original).upper()
    return texts, true


def measure_finding(corpus: str, per_level: int, min_similarity: float) -> str:
    """Returns a table with the share of planted duplicates that were found."""
    texts, true = plant(passages(corpus, 2 * per_level * len(LEVELS)), per_level)
    rules = Options(corpus="", output="", min_similarity=min_similarity).rules
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        lines = (json.dumps({"id": name, "text": text}) for name, text in texts.items())
        (path / "planted.jsonl").write_text("\n".join(lines))
        where = (f"--corpus=json:{path}/planted.jsonl", f"--output={path}/out")
        dedup.main([*where, f"--min_similarity={min_similarity}"])
        report = json.loads((path / "out" / "report.json").read_text())
        listed = ExcludeList(str(path / "out" / "exclude.arrow"))
        digests = id_digests(texts)
        named = dict(zip((tuple(map(int, each)) for each in digests), texts, strict=True))
        found = {named[row["high"], row["low"]]: row for row in listed}
    rows = []
    for level in LEVELS:
        mine = [name for name in true if name.startswith(f"copy {level}/")]
        if mine:
            predicted = sum(rules.probability(true[name]) for name in mine) / len(mine)
            share = sum(name in found for name in mine) / len(mine)
            mean = sum(true[name] for name in mine) / len(mine)
            rows.append((f"{mean:.3f}", len(mine), f"{share:.3f}", f"{predicted:.3f}"))
    exact = [name for name in texts if name.startswith("same ")]
    exact_found = sum(found.get(name, {}).get("reason") == EXACT for name in exact)
    near = [name for name in found if name in true]
    others = len(found) - len(near) - sum(name in found for name in exact)
    right = sum(true[name] >= rules.wanted for name in near) / max(len(near), 1)
    alike = [name for name in true if true[name] >= rules.wanted]
    return (
        table(("similarity", "pairs", "found", "predicted"), rows, markdown=True)
        + f"\n\nexact duplicates found: {exact_found:,} of {len(exact):,}; documents listed that "
        f"were not planted: {others}\nprecision and recall at similarity {rules.wanted:.2f}: "
        f"{right:.3f}, {sum(name in found for name in alike) / len(alike):.3f}; "
        f"false positives, measured and reported: {1 - right:.3f}, "
        f"{report['false_positives']:.3f}"
    )


def measure_speed(corpus: str, python: str | None, their_bytes: int) -> str:
    """Returns the table of speeds."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        sizes = {}
        for name, limit in (("whole", None), ("some", their_bytes), ("few", 0)):
            sizes[name] = _write(corpus, path / f"{name}.jsonl", limit)
        costs = {}
        for name in ("few", "few", "whole"):  # the first run compiles
            command = [
                sys.executable, "-m", "pipeline.annexes.deduplication.dedup",
                f"--corpus=json:{path}/{name}.jsonl", f"--output={path}/out-{len(costs)}{name}",
            ]  # fmt: skip
            costs[name] = cost_of(command)
        ours = sizes["whole"] / 1e6 / (costs["whole"] - costs["few"]).core
        rows = [
            ("palimpsest dedup, all of it", f"{sizes['whole'] / 1e6:.1f}", f"{ours:.2f}", "1.00")
        ]
        for how in ("spacy", "split") if python else ():
            command = [python, "-c", _DATATROVE, f"{path}/some.jsonl", how]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            theirs = sizes["some"] / 1e6 / float(output.split()[-1])
            words = "" if how == "spacy" else ", split at spaces"
            rows.append(
                (f"datatrove, signatures{words}", f"{sizes['some'] / 1e6:.1f}",
                 f"{theirs:.2f}", f"{theirs / ours:.4f}")
            )  # fmt: skip
    return table(("command", "MB", "MB/s per core", "ratio"), rows, markdown=True)


def _write(corpus: str, path: pathlib.Path, limit: int | None) -> int:
    """Writes documents up to `limit` bytes, at least 20; returns the bytes of their text."""
    size = 0
    with path.open("w") as file:
        for number, (name, text) in enumerate(documents(corpus)):
            if limit is not None and number >= 20 and size >= limit:
                break
            file.write(json.dumps({"id": name, "text": text}) + "\n")
            size += len((text or "").encode())
    return size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    corpus: str = field("python_docs", "corpus SPEC")
    pairs: int = field(200, "number of planted pairs at each similarity", rule=at_least(1))
    datatrove_python: str | None = field(None, "interpreter of an environment with datatrove")
    their_bytes: int = field(2 << 20, "size of datatrove's text in bytes", rule=at_least(1))
    only: str | None = field(None, "measure only this", choices=("finding", "speed"))


def run(flags: Flags) -> None:
    """Prints the tables."""
    print(machine())
    if flags.only != "speed":
        print(measure_finding(flags.corpus, flags.pairs, 0))
        print("\nwith --min_similarity=0.72:\n")
        print(measure_finding(flags.corpus, flags.pairs, 0.72))
    if flags.only != "finding":
        print(measure_speed(flags.corpus, flags.datatrove_python, flags.their_bytes))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
