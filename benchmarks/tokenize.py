"""Compares the fast tokenizer with the libraries, in speed and in the ids of every document.

    python -m benchmarks.text --output=text.parquet
    python -m benchmarks.tokenize --text=text.parquet --train=unigram:8000 --train=unigram:32000 \\
        --train=unigram:250000 --train=bpe:32000 [--vocabulary=VOCABULARY ...]

Both sides run in one thread on batches of 256 documents; time is processor time. The library is
SentencePiece or, for a tokenizer.json, `tokenizers`: the fastest of `encode_batch_fast`, which
encodes every batch, and `encode_batch` and `encode`, which encode one in ten. "first" is the speed
on new text, "again" the speed of a second pass over 1 % of it. "differ" counts documents with
different ids, "left" the texts that the fast tokenizer left to the library.
"""

import dataclasses
import io
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece

from benchmarks.machine import machine
from pipeline.tokenizer import tokenize
from tasks import vocabulary
from tasks.terminal import progress
from tasks.terminal.command import Command
from tasks.terminal.fields import REQUIRED, at_least, field
from tasks.terminal.table import table
from tasks.vocabularies import byte_level
from tasks.vocabularies.tokenizer_json import TokenizersCodec
from tasks.vocabulary import Vocabulary

_SAMPLE_BYTES = 20e6


def train(kind: str, text: pa.ChunkedArray) -> bytes:
    """Trains a SentencePiece model whose type and size are given as "TYPE:SIZE"."""
    model_type, _, size = kind.partition(":")
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
        sentence_iterator=lines(), model_writer=model, model_type=model_type, vocab_size=int(size),
        hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def _library(loaded: Vocabulary) -> dict[str, Callable[[list[str]], list[list[int]]]]:
    """Returns the ways in which the library encodes texts; the first encodes all of them."""
    codec = loaded.codec
    if loaded.is_sentencepiece:
        return {"encode": lambda texts: loaded.processor.encode(texts, num_threads=1)}
    if loaded.model == byte_level.byte_vocabulary():
        return {"codec": lambda texts: [ids.tolist() for ids in codec.encode(texts)]}
    assert isinstance(codec, TokenizersCodec)
    tokenizer, plain = codec.tokenizer, {"add_special_tokens": False}
    return {
        "encode_batch_fast": lambda texts: tokenizer.encode_batch_fast(texts, **plain),
        "encode_batch": lambda texts: tokenizer.encode_batch(texts, **plain),
        "encode": lambda texts: [tokenizer.encode(text, **plain) for text in texts],
    }


def compare(name: str, loaded: Vocabulary, text: list[pa.Array]) -> tuple[str, ...]:
    """Returns one vocabulary's row of the table, measured on batches of documents."""
    tokenize.fast(loaded).encode(pa.array(["compiles"]))
    begin = time.process_time()
    fast = tokenize.fast(loaded)
    load = time.process_time() - begin
    library = _library(loaded)
    seconds, sizes = Counter[str](), Counter[str]()
    documents = different = 0

    def timed(way: str, size: int, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = work()
        seconds[way] += time.process_time() - begin
        sizes[way] += size
        return result

    for number, batch in enumerate(text):
        size = int(tokenize.text_bytes(batch).sum())
        tokens, lengths = timed("first", size, lambda batch=batch: fast.encode(batch))
        tokens, texts = tokens.copy(), batch.to_pylist()
        expected = []
        for place, (way, encode) in enumerate(library.items()):
            if place == 0 or number % 10 == 0:
                found = timed(way, size, lambda encode=encode, texts=texts: encode(texts))
                expected = expected or [getattr(each, "ids", each) for each in found]
        ends = np.cumsum(lengths)
        different += sum(
            tokens[end - length : end].tolist() != ids
            for end, length, ids in zip(ends, lengths, expected, strict=True)
        )
        documents += len(batch)
        if number % 100 == 0:
            timed("again", size, lambda batch=batch: fast.encode(batch))
    speed = {way: sizes[way] / 1e6 / seconds[way] for way in sizes}
    best = max(library, key=lambda way: speed[way])
    return (
        *(name, f"{loaded.record.pieces:,}", f"{speed[best]:.1f} {best}", f"{speed['first']:.1f}"),
        *(f"{speed['first'] / speed[best]:.1f}", f"{speed['again']:.0f}"),
        *(f"{different:,} of {documents:,}", str(fast.refused), f"{load * 1e3:.0f}"),
    )


def batches(path: str, megabytes: int | None) -> list[pa.Array]:
    """Returns `megabytes` of a Parquet file's texts, repeated if too few, in batches of 256."""
    whole = pq.read_table(path)["text"].combine_chunks()
    whole = pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
    found = [whole.slice(start, 256) for start in range(0, len(whole), 256)]
    size, room = int(tokenize.text_bytes(whole).sum()), (megabytes or 0) * 1e6
    for turn in range(1, int(np.ceil(room / size)) if size else 0):
        again = whole.take(np.random.default_rng(turn).permutation(len(whole)))
        found += [again.slice(start, 256) for start in range(0, len(again), 256)]
    sizes = np.cumsum([tokenize.text_bytes(batch).sum() for batch in found])
    return found[: np.searchsorted(sizes, room) + 1] if megabytes else found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    text: str = field(REQUIRED, "Parquet file with a column text, from benchmarks.text")
    train: tuple[str, ...] = field(
        (),
        "vocabulary to train on the text; TYPE is unigram or bpe; may be repeated",
        metavar="TYPE:SIZE",
        repeated=True,
    )
    vocabulary: tuple[str, ...] = field(
        (), "vocabulary to compare with, of any kind; may be repeated", repeated=True
    )
    megabytes: int | None = field(
        None,
        "size of the text, which is repeated if shorter; None: all of it once",
        rule=at_least(1),
    )


def run(flags: Flags) -> None:
    """Prints the table."""
    text = batches(flags.text, flags.megabytes)
    given, kinds = flags.vocabulary, flags.train
    loaded = ((path, vocabulary.load(path)) for path in given)
    whole = pq.read_table(flags.text)["text"] if kinds else None
    trained = ((kind, vocabulary.from_bytes(train(kind, whole), name=kind)) for kind in kinds)
    rows = []
    with progress.shown("comparing", len(given) + len(kinds)) as bar:
        for name, each in itertools.chain(loaded, trained):
            rows.append(compare(name, each, text))
            bar.update(len(rows))
    header = ("vocabulary", "ids", "library (MB/s)", "first (MB/s)", "ratio", "again (MB/s)",
              "differ", "left", "load (ms)")  # fmt: skip
    print(machine())
    print(table(header, rows, markdown=True))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
