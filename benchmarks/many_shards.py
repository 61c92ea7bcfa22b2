"""Measures what a cache of 20,000 shards and 1e9 documents costs one machine, step by step.

    python -m benchmarks.many_shards --shards=2000,8000,20000

One file of documents is built into one shard. The corpus is that file under many names, and the
cache that shard under many names, as hard links with receipts of their own: to the project an
ordinary cache, on a disk that holds one shard. Each step is a command of its own; "peak" is the
memory of its largest process.

  plan     pipeline.build --dry_run, which lists, hashes and cuts the corpus and builds a sample
  finish   pipeline.build where all shards are built: checks every checksum, writes the manifest
  again    pipeline.build of the finished cache
  open     a trainer's data: manifest, windows, the first batches in global order
  block    the same in block order
  resume   the same, from a late step
  host     the same for one host of eight
  explain  trainer.explain of a batch
  document trainer.explain of a document, which reads the ids of all
  verify   pipeline.verify, of caches of at most --verify shards
  extend   pipeline.build --extend with ten more files

The memory stands beside that of the formula in docs/scale.md.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.build import run
from benchmarks.machine import machine
from pipeline.building import lifecycle
from tasks import vocabulary
from tasks.cache.manifest import SHARD_KINDS, CacheManifest, as_json, shard_file
from tasks.storage import files
from tasks.terminal.command_line import Parser, positive

TASK = "many_span_corruption"
_SEED_FILES = 8  # fewer would be cut into several pieces each
_MORE_FILES = 10
_LATE_STEP = 1_000_000
_STEPS = 4
_SECONDS = "seconds.json"
_OPEN = ("open", "block", "resume", "host")
_NAMES = ("plan", "finish", "again", *_OPEN, "explain", "document", "verify", "extend")
# The formula of docs/scale.md: what a step takes with no shard, and for each shard and its file.
_BASE_MB = {"plan": 395, "extend": 395, "finish": 165, "again": 165, **dict.fromkeys(_OPEN, 225),
            "explain": 300, "document": 175, "verify": 310}  # fmt: skip
_SHARD_BYTES = {"plan": 1500, "extend": 11_000, "finish": 10_000, "again": 10_000,
                **dict.fromkeys(_OPEN, 4_000), "explain": 4_000, "document": 4_000,
                "verify": 200}  # fmt: skip


def write_corpus_file(path: pathlib.Path, documents: int) -> None:
    """Writes documents of about 20 bytes, with ids of their own."""
    letters = random.Random(0).choices("etaoin shrdlu", k=20 * documents)
    text = "".join(letters)
    texts = [text[start : start + 20] for start in range(0, len(text), 20)]
    names = [f"document {number}" for number in range(documents)]
    pq.write_table(pa.table({"id": names, "text": texts}), path, row_group_size=documents)


def build(folder: pathlib.Path, *more: str) -> list[str]:
    """Returns the command that builds the cache of the corpus in `folder`."""
    path = next((folder / "corpus").iterdir())
    columns = pq.ParquetFile(path).metadata.row_group(0)
    size = sum(
        each.total_uncompressed_size
        for each in map(columns.column, range(columns.num_columns))
        if each.path_in_schema == "text"
    )
    return [
        *(sys.executable, "-m", "pipeline.build", "--task=span_corruption", "--name=many"),
        *(f"--corpus=parquet:{folder}/corpus/*.parquet?validation=0", "--vocabulary=bytes"),
        *("--extra_ids=100", f"--shard_bytes={size}", f"--cache_dir={folder}/cache", *more),
    ]


def link_corpus(source: pathlib.Path, folder: pathlib.Path, numbers: range) -> None:
    """Links a file into a corpus, once for each number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        os.link(source, folder / f"{number:07}.parquet")


def link_cache(seed: pathlib.Path, folder: pathlib.Path, count: int) -> None:
    """Makes a cache of `count` shards that are the seed's first one, without its closing files."""
    manifest = CacheManifest.load(str(seed))
    first = manifest.plan.corpus["files"][0]
    named = [{**first, "name": f"{number:07}.parquet"} for number in range(count)]
    left_out = manifest.plan.corpus["left_out"]
    corpus = {**manifest.plan.corpus, "files": named, "left_out": left_out}
    plan = dataclasses.replace(manifest.plan, corpus=corpus, shards={"train": count})
    folder.mkdir(parents=True)
    lifecycle.begin(str(folder), plan, vocabulary.load("bytes", 100), extend=False)
    shard, of_seed = manifest.splits["train"][0], len(manifest.splits["train"])
    for number in range(count):
        names = {}
        for kind in SHARD_KINDS:
            if (name := shard_file("train", kind, 0, of_seed)) in shard.files:
                names[name] = shard_file("train", kind, number, count)
                os.link(seed / name, folder / names[name])
        entries = {new: shard.files[name] for name, new in names.items()}
        receipt = as_json(dataclasses.replace(shard, files=entries))
        path = folder / shard_file("train", "receipt", number, count)
        path.write_bytes(files.json_bytes(receipt))  # unsynced: 20,000 are written


def config_of(folder: pathlib.Path, order: str = "global"):
    """Returns the configuration of a run on the cache in `folder`, and its origins."""
    from trainer.config.from_flags import build_config

    given = {
        **{"task": TASK, "cache_dir": f"{folder}/cache", "model_dir": f"{folder}/model"},
        **{"train_steps": 2 * _LATE_STEP, "batch_size": 128, "data.shuffle": order},
        **{"lengths.inputs": 512, "lengths.targets": 114},
    }
    return build_config("t5_1_1_tiny", [f"--{name}={value}" for name, value in given.items()])


def open_data(folder: pathlib.Path, order: str, step: int, host: int, hosts: int) -> None:
    """Opens a cache as a run does, makes some batches, and writes the seconds of each part."""
    started = time.monotonic()
    seconds = {}

    def ended(part: str) -> None:
        nonlocal started
        seconds[part] = time.monotonic() - started
        started = time.monotonic()

    from trainer.data.cached import CachedData
    from trainer.setup import prepare

    config, origins = config_of(folder, order)
    ended("imports")
    run_ = prepare(config, origins)
    ended("manifest")
    assert isinstance(run_.data, CachedData)
    batches = run_.data.batches(host, hosts)
    ended("windows")
    for number in range(_STEPS):
        batches[step + number]
    ended(f"{_STEPS} batches")
    (folder / _SECONDS).write_text(json.dumps(seconds))


def write_run(folder: pathlib.Path) -> None:
    """Writes config.json of a run on the cache, for trainer.explain."""
    from trainer.config import save_config
    from trainer.setup import prepare

    config, origins = config_of(folder)
    os.makedirs(config.model_dir)
    save_config(prepare(config, origins).config, origins)


def measure(folder: pathlib.Path, seed: pathlib.Path, count: int, steps: list[str]):
    """Yields (step, its cost, a note) of a cache of `count` shards."""
    link_corpus(seed / "corpus" / f"{0:07}.parquet", folder / "corpus", range(count))
    cache = folder / "cache" / TASK
    opening = [sys.executable, "-m", "benchmarks.many_shards", f"--folder={folder}"]
    command = build(folder)
    commands = {
        "plan": [*command, "--dry_run"],
        "finish": command,
        "again": command,
        "open": opening,
        "block": [*opening, "--order=block"],
        "resume": [*opening, f"--step={_LATE_STEP}"],
        "host": [*opening, "--host=3", "--hosts=8"],
        "explain": [
            *(sys.executable, "-m", "trainer.explain", f"--model_dir={folder}/model"),
            f"--step={_LATE_STEP}",
        ],
        "document": [
            *(sys.executable, "-m", "trainer.explain", f"--model_dir={folder}/model"),
            "--document=another",
        ],
        "verify": [sys.executable, "-m", "pipeline.verify", f"--cache={cache}"],
        "extend": [*command, "--extend"],
    }
    for step, wanted in commands.items():
        if step == "finish":
            link_cache(seed / "cache" / TASK, cache, count)
        if step not in steps:
            continue
        note = ""
        if step in ("explain", "document") and not (folder / "model").exists():
            write_run(folder)
        if step == "extend":
            more = range(count, count + _MORE_FILES)
            link_corpus(seed / "corpus" / f"{0:07}.parquet", folder / "corpus", more)
        before = _states(cache) if step == "extend" else set()
        cost = run(wanted)
        if wanted[: len(opening)] == opening:
            seconds = json.loads((folder / _SECONDS).read_text())
            note = ", ".join(f"{part} {each:.1f}" for part, each in seconds.items())
        if step == "extend":
            note = _rewritten(before, cache)
        yield step, cost, note


def _states(cache: pathlib.Path) -> set[tuple[int, int]]:
    """Returns (number, time of writing) of the files of a cache; a rename keeps both."""
    states = (path.stat() for path in cache.glob("*"))
    return {(state.st_ino, state.st_mtime_ns) for state in states}


def _rewritten(before: set[tuple[int, int]], cache: pathlib.Path) -> str:
    """Returns how many files of each kind an extension wrote, given the files before it."""
    states = ((path.name, path.stat()) for path in cache.glob("*"))
    new = [name for name, each in states if (each.st_ino, each.st_mtime_ns) not in before]
    receipts = sum(".receipt-" in name for name in new)
    others = sum("-of-" in name for name in new) - receipts
    return f"wrote {receipts:,} receipts and {others:,} other files of shards"


def main() -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.many_shards", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shards", default="2000,8000,20000", help="sizes of the caches, at most 60,000 each")
    add("--documents", type=positive, default=50_000, help="documents of a shard")
    add("--verify", type=int, default=2000, help="most shards of a cache that is verified")
    add("--steps", default=",".join(_NAMES), help="which steps to measure")
    add("--scratch", help="folder for the caches; the system's temporary folder by default")
    add("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    add("--order", default="global", help=argparse.SUPPRESS)
    for name, value in (("step", 0), ("host", 0), ("hosts", 1)):
        add(f"--{name}", type=int, default=value, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.folder:
        open_data(flags.folder, flags.order, flags.step, flags.host, flags.hosts)
        return
    sizes = [int(each) for each in flags.shards.split(",")]
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(dir=flags.scratch) as scratch:
        seed = pathlib.Path(scratch) / "seed"
        (seed / "corpus").mkdir(parents=True)
        write_corpus_file(seed / "corpus" / f"{0:07}.parquet", flags.documents)
        link_corpus(seed / "corpus" / f"{0:07}.parquet", seed / "corpus", range(1, _SEED_FILES))
        run(build(seed))
        for count in sizes:
            folder = pathlib.Path(scratch) / str(count)
            wanted = [
                each for each in flags.steps.split(",") if each != "verify" or count <= flags.verify
            ]
            print(f"\n{count:,} shards: seconds, core seconds, peak MB, MB by the formula")
            for step, cost, note in measure(folder, seed, count, wanted):
                formula = (_BASE_MB[step] * 1e6 + _SHARD_BYTES[step] * count) / 1e6
                sizes_ = f"{cost.peak / 1e6:7,.0f} {formula:7,.0f}"
                print(f"{step:8} {cost.wall:8.1f} {cost.core:7.1f} {sizes_}  {note}", flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
