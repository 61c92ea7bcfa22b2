"""Compares the fast tokenizer with the libraries, in speed and in the ids of every document.

    python -m benchmarks.text --output=text.parquet
    python -m benchmarks.tokenize --text=text.parquet --train=unigram:32000 --train=bpe:32000 \\
        --train=byte_bpe:32000 --train=wordpiece:32000 [--vocabulary=VOCABULARY ...] \\
        [--text=romanian.parquet ...] [--python=VENV/bin/python ...]

Each encoder runs in a process and one thread of its own, on batches of 256 documents; time is
processor time, memory the most that the process held, with the texts. "first" is the speed on new
text, "again" that of a second pass. "differ" counts documents whose ids are not ours.

SentencePiece, `tokenizers`, gigatoken and fastokens are measured where they are installed: in this
Python and in those of --python, such as an environment with another SentencePiece.
"""

import dataclasses
import io
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece

from benchmarks import encoders
from benchmarks.machine import machine
from pipeline.tokenizer import tokenize
from tasks import vocabulary
from tasks.terminal import progress
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.terminal.table import table
from vocab.annexes.training_tokenizers import train_tokenizer

_SAMPLE_BYTES = 20e6
_JSON = ("tokenizers", "gigatoken", "fastokens")
_SENTENCEPIECE = ("sentencepiece", "gigatoken")


def train(kind: str, path: str) -> bytes:
    """Trains a vocabulary on a Parquet file; its type and size are given as "TYPE:SIZE"."""
    model_type, _, size = kind.partition(":")
    if model_type in train_tokenizer.SPECIAL:
        with tempfile.TemporaryDirectory() as folder:
            flags = (f"--kind={model_type}", f"--vocab_size={size}", f"--output={folder}/v")
            corpus = f"--corpus=parquet:{path}?validation=0"
            command = [sys.executable, "-m", "palimpsest", "vocab", "train_tokenizer"]
            subprocess.run([*command, corpus, *flags], check=True, stdout=subprocess.DEVNULL)
            return pathlib.Path(folder, "v", "tokenizer.json").read_bytes()
    return _sentencepiece(model_type, int(size), pq.read_table(path)["text"])


def _sentencepiece(model_type: str, size: int, text: pa.ChunkedArray) -> bytes:
    room = _SAMPLE_BYTES if model_type == "unigram" else _SAMPLE_BYTES / 4

    def lines() -> Iterator[str]:
        used = 0
        order = np.random.default_rng(0).permutation(len(text)).tolist()
        for line in itertools.chain.from_iterable(text[i].as_py().splitlines() for i in order):
            if 0 < len(line) < 2000:
                used += len(line)
                if used > room:
                    return
                yield line

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(), model_writer=model, model_type=model_type, vocab_size=size,
        hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def write(path: str, megabytes: int | None, folder: pathlib.Path) -> str:
    """Writes a Parquet file's texts for `encoders`; returns what they are, for the table."""
    name = pathlib.Path(path).stem
    whole = pq.read_table(path)["text"].cast(pa.large_string())
    texts = pa.concat_arrays(whole.chunks)
    sizes = np.cumsum(tokenize.text_bytes(texts))
    texts = texts[: np.searchsorted(sizes, megabytes * 1e6) + 1] if megabytes else texts
    sizes = sizes[: len(texts)]
    with open(folder / f"{name}.utf8", "wb") as file:
        for start in range(0, len(texts), encoders.BATCH):
            file.write("".join(texts[start : start + encoders.BATCH].to_pylist()).encode())
    np.save(folder / f"{name}.ends.npy", sizes)
    return f"{name}: {sizes[-1] / 1e6:.1f} MB, {len(texts):,} documents"


def rows(model: bytes, pythons: list[str], folder: pathlib.Path) -> Iterator[tuple[str, ...]]:
    """Yields the rows of one vocabulary's table."""
    is_json = model.lstrip()[:1] == b"{"
    (folder / "model").write_bytes(model)
    names = sorted(path.stem for path in folder.glob("*.utf8"))
    done: set[str] = set()
    wanted = itertools.product(pythons, _JSON if is_json else _SENTENCEPIECE)
    for python, name in [(sys.executable, "ours"), *wanted]:
        answer = _measured(python, name, folder)
        if answer is None or f"{name} {answer['version']}" in done:
            continue
        if name == "ours" and answer["why"]:
            raise UserError(f"the fast tokenizer cannot encode: {answer['why']}")
        done.add(f"{name} {answer['version']}")
        cells = []
        for text in names:
            speeds = answer["texts"].get(text)
            cells += [f"{speed:.1f}" for speed in speeds or ()] or ["–", "–"]
            sums = [
                np.load(folder / f"{text}.{each}.npy")
                for each in ("ours.", f"{name}.{answer['version']}")
                if speeds
            ]
            cells.append(f"{(sums[0] != sums[1]).sum():,}" if sums else "–")
        yield (f"{name} {answer['version']}".strip(), *cells, f"{answer['memory']:.0f}")
        if answer["why"]:
            print(f"{name} {answer['version']}: {answer['why']}", file=sys.stderr)


def _measured(python: str, name: str, folder: pathlib.Path) -> dict | None:
    """Returns what an encoder printed; None if this Python lacks it."""
    known = f"import importlib.util as u; print(u.find_spec({name!r}) is not None)"
    has = subprocess.run([python, "-c", known], check=True, capture_output=True, text=True)
    if name != "ours" and has.stdout.strip() == "False":
        return None
    # Isolated: this folder's tokenize.py is not Python's.
    script = ["-m", "benchmarks.encoders"] if name == "ours" else ["-I", encoders.__file__]
    command = [python, *script, name, str(folder / "model"), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    text: tuple[str, ...] = field(
        REQUIRED, "Parquet file with a column text, from benchmarks.text; may be repeated",
        repeated=True,
    )  # fmt: skip
    train: tuple[str, ...] = field(
        (),
        "vocabulary to train on the first text; TYPE is unigram, bpe, byte_bpe or wordpiece; may "
        "be repeated",
        metavar="TYPE:SIZE",
        repeated=True,
    )
    vocabulary: tuple[str, ...] = field(
        (), "vocabulary to compare with, of any kind; may be repeated", repeated=True
    )
    python: tuple[str, ...] = field(
        (), "another Python whose libraries are measured too; may be repeated", repeated=True
    )
    megabytes: int | None = field(None, "at most so much of each text", rule=at_least(1))


def run(flags: Flags) -> None:
    """Prints a table for each vocabulary."""
    given = ((path, vocabulary.load(path).model) for path in flags.vocabulary)
    trained = ((kind, train(kind, flags.text[0])) for kind in flags.train)
    pythons = [sys.executable, *flags.python]
    with tempfile.TemporaryDirectory() as folder:
        texts = [write(path, flags.megabytes, pathlib.Path(folder)) for path in flags.text]
        names = sorted(pathlib.Path(path).stem for path in flags.text)
        columns = [f"{text}: {what}" for text in names for what in ("first", "again", "differ")]
        print(machine(), *texts, sep="\n")
        with progress.shown("comparing", len(flags.vocabulary) + len(flags.train)) as bar:
            for number, (name, model) in enumerate(itertools.chain(given, trained)):
                found = [*rows(model, pythons, pathlib.Path(folder))]
                header = (name, *columns, "memory (MB)")
                print(f"\n{table(header, found, markdown=True)}", flush=True)
                bar.update(number + 1)


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
