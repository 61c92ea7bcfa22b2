"""Compares the fast tokenizer with SentencePiece: its speed, and the ids of every document.

    python -m benchmarks.text --output=text.parquet
    python -m benchmarks.tokenize --text=text.parquet --train=unigram:8000 --train=unigram:32000 \\
        --train=unigram:250000 --train=bpe:32000 [--vocabulary=FILE.model ...]

Both run in one thread on batches of 256 documents; time is processor time. `--train` trains a
vocabulary on a sample of the text. "first" is the speed on new text, "again" that of a second pass
over 1 % of it. "differ" counts documents with different ids, "left" the texts that the fast
tokenizer left to SentencePiece.
"""

import io
import itertools
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece

from benchmarks.machine import machine
from pipeline.tokenizer import fast_tokenizer
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import Parser
from tasks.terminal.table import table

_SAMPLE_BYTES = 20e6


def train(kind: str, text: pa.ChunkedArray) -> bytes:
    """Returns a SentencePiece model of a type and size, given as "TYPE:SIZE"."""
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


def compare(name: str, model: bytes, text: pa.ChunkedArray) -> tuple[str, ...]:
    """Returns a row of the table: the comparison for one vocabulary."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    fast_tokenizer.from_model(model, processor).encode(pa.array(["compiles"]))
    begin = time.process_time()
    fast = fast_tokenizer.from_model(model, processor)
    load = time.process_time() - begin
    seconds = dict.fromkeys(("first", "sentencepiece", "again"), 0.0)
    size = again_size = different = 0
    for number, chunk in enumerate(text.chunks):
        for start in range(0, len(chunk), 256):
            batch = chunk[start : start + 256]
            begin = time.process_time()
            tokens, lengths = fast.encode(batch)
            seconds["first"] += time.process_time() - begin
            tokens, texts = tokens.copy(), batch.to_pylist()
            begin = time.process_time()
            expected = processor.encode(texts, num_threads=1)
            seconds["sentencepiece"] += time.process_time() - begin
            ends = np.cumsum(lengths)
            different += sum(
                tokens[end - length : end].tolist() != ids
                for end, length, ids in zip(ends, lengths, expected, strict=True)
            )
            bytes_here = sum(len(each.encode()) for each in texts)
            size += bytes_here
            if (start // 256) % 100 == number % 100:
                begin = time.process_time()
                fast.encode(batch)
                seconds["again"] += time.process_time() - begin
                again_size += bytes_here
    speed = {key: size / 1e6 / value for key, value in seconds.items()}
    speed["again"] = again_size / 1e6 / seconds["again"]
    ratio = speed["first"] / speed["sentencepiece"]
    return (
        *(name, f"{len(processor):,}", f"{speed['sentencepiece']:.1f}", f"{speed['first']:.1f}"),
        *(f"{ratio:.1f}", f"{speed['again']:.0f}", f"{different:,} of {len(text):,}"),
        *(str(fast.refused), f"{load * 1e3:.0f}"),
    )


def main() -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.tokenize", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", required=True, help="Parquet file with a column text, as benchmarks.text writes")
    add("--train", action="append", metavar="TYPE:SIZE",
        help="vocabulary to train on the text, TYPE unigram or bpe; may be repeated")  # fmt: skip
    add("--vocabulary", action="append",
        help="SentencePiece model to compare with, a file; may be repeated")  # fmt: skip
    flags = parser.parse_args()
    text = pq.read_table(flags.text)["text"]
    models = {path: files.read_bytes(path) for path in flags.vocabulary or ()}
    kinds = flags.train or ()
    trained = ((kind, train(kind, text)) for kind in kinds)
    rows = []
    with progress.shown("comparing", len(models) + len(kinds)) as bar:
        for name, model in itertools.chain(models.items(), trained):
            rows.append(compare(name, model, text))
            bar.update(len(rows))
    header = ("vocabulary", "ids", "SentencePiece (MB/s)", "first (MB/s)", "ratio", "again (MB/s)",
              "differ", "left", "load (ms)")  # fmt: skip
    print(machine())
    print(table(header, rows, markdown=True))


if __name__ == "__main__":
    main()
