"""Measures a build of a corpus of very small files: seconds and memory of every step.

    python -m benchmarks.small_files --files=10000 --bytes=1000

Makes a corpus of one JSON line a file and a vocabulary, then runs each step as a command of its
own. "peak" is the memory of the step's largest process.

  plan    pipeline.build --dry_run, which lists the files and builds a sample, all of a small corpus
  build   pipeline.build
  again   pipeline.build of the finished cache, which plans and checks it
  verify  pipeline.verify
  open    the trainer's windows of the train split, and the first of them
"""

import json
import pathlib
import random
import sys
import tempfile

from benchmarks.build import TASK, run
from benchmarks.machine import machine
from tasks.terminal import progress
from tasks.terminal.command_line import Parser, positive
from tasks.terminal.table import table

_FILES_PER_FOLDER = 1000
_WINDOW = 128
_OPEN = f"""
import sys
from tasks.cache.cache import Cache
from tasks.cache.windows import Windows
cache = Cache.open(sys.argv[1])
windows = Windows(cache.folder, cache.manifest, "train", {_WINDOW})
windows.read([0])
"""


def make_corpus(folder: pathlib.Path, files: int, size: int) -> None:
    """Writes `files` files of about `size` bytes, 1,000 a folder."""
    generator = random.Random(0)
    words = [
        "".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 9))) for _ in range(999)
    ]
    for number in range(files):
        parent = folder / f"{number // _FILES_PER_FOLDER:04}"
        if number % _FILES_PER_FOLDER == 0:
            parent.mkdir(parents=True)
        text = " ".join(generator.choices(words, k=size // 6 + 1))[: max(size - 13, 1)]
        (parent / f"{number:07}.jsonl").write_text(json.dumps({"text": text}) + "\n")


def make_vocabulary(corpus: pathlib.Path, folder: pathlib.Path) -> None:
    """Trains 500 pieces on the first folder of the corpus."""
    import sentencepiece

    folder.mkdir()
    lines = (path.read_text() for path in sorted((corpus / "0000").iterdir()))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(json.loads(line)["text"][:4000] for line in lines),
        model_prefix=str(folder / "sentencepiece"), vocab_size=500, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip


def main() -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.small_files", description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=positive, default=10_000, help="files of the corpus")
    parser.add_argument("--bytes", type=positive, default=1000, help="bytes of a file")
    parser.add_argument("--workers", type=positive, default=1, help="worker processes of the build")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        make_corpus(folder / "corpus", flags.files, flags.bytes)
        make_vocabulary(folder / "corpus", folder / "vocabulary")
        cache = folder / "cache" / TASK
        build = [
            sys.executable, "-m", "pipeline.build", f"--task={TASK}", "--extra_ids=100",
            f"--corpus=json:{folder}/corpus/**/*.jsonl", f"--vocabulary={folder}/vocabulary",
            f"--cache_dir={folder}/cache", f"--workers={flags.workers}",
        ]  # fmt: skip
        steps = {
            "plan": [*build, "--dry_run"],
            "build": build,
            "again": build,
            "verify": [sys.executable, "-m", "pipeline.verify", f"--cache={cache}"],
            "open": [sys.executable, "-c", _OPEN, str(cache)],
        }
        rows = []
        with progress.shown("measuring", len(steps)) as bar:
            for name, command in steps.items():
                cost = run(command)
                rows.append(
                    (name, f"{cost.wall:.1f}", f"{cost.core:.1f}", f"{cost.peak / 1e6:,.0f}")
                )
                bar.update(len(rows))
        sizes = {path.name: path.stat().st_size for path in cache.iterdir()}
    print(machine())
    print(table((f"{flags.files:,} files", "seconds", "core seconds", "peak, MB"), rows))
    print(
        f"the cache: {len(sizes):,} files, {sum(sizes.values()) / 1e6:,.1f} MB, plan.json "
        f"{sizes['plan.json'] / 1e6:,.1f} MB, manifest.json {sizes['manifest.json'] / 1e6:,.1f} MB"
    )


if __name__ == "__main__":
    main()
