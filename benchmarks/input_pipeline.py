"""Compares how fast cached tokens become batches here and in T5's tf.data pipeline.

    python -m benchmarks.input_pipeline [--tokens=1e9] [--batch_size=128] [--cores=0,1]

Batches are span corruption with 512 inputs and 114 targets: encoder_input_tokens and
decoder_{input_tokens,target_tokens,loss_weights} as numpy arrays. Tokens are counted in the corpus,
568 per example.

The cache, in a temporary folder, is one shard of --shard_tokens ids and hard links to it as further
shards, --tokens in total, so records are read from memory, while files, index and order are as in a
full cache. There are 32,000 different ids, distributed by Zipf's law because an id's size in bytes
depends on its rank.

ours   trainer.data.batches.TrainingBatches: global shuffle, checksums, noise, features
T5     tf.data over the same records: TFRecordDataset, parse, T5's span corruption in TensorFlow
       operations, EOS, trim and pad, shift, batch; without shuffling, which would cost more

Every measurement is a separate process. The first three rows make batches in one thread on the
first of --cores; their speed is per processor second, the median of --repeats intervals of
--seconds each, and they alternate for --rounds. In rows with "n threads", grain prefetches batches
on all --cores, and the speed is per second of wall time. "peak" is the process's VmHWM.
"""

import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.machine import machine
from tasks.terminal.command import Command
from tasks.terminal.flag_fields import at_least, field
from tasks.terminal.table import table

INPUTS, TARGETS, WINDOW = 512, 114, 568
_PIECES, _SENTINELS = 32_000, 100
_FIRST_PIECE = 3


def make_cache(folder: pathlib.Path, row_tokens: int, tokens: int, shard_tokens: int) -> None:
    """Writes one shard, and links to it until the cache has `tokens`."""
    import pyarrow as pa

    from pipeline.building import write
    from tasks.cache.manifest import MANIFEST, CacheManifest, Plan, shard_file
    from tasks.cache.pack import Documents
    from tasks.cache.receipts import read_receipt
    from tasks.storage import files
    from tasks.vocabulary import VocabularyRecord

    count = max(1, round(tokens / shard_tokens))
    vocabulary = VocabularyRecord("", _PIECES, _SENTINELS, _SENTINELS)
    plan = Plan("benchmark", {}, vocabulary, "concat", row_tokens, "eos", {"train": count})
    generator = np.random.default_rng(0)
    with write.ShardWriter(str(folder), plan, "train", 0) as writer:
        left = min(tokens, shard_tokens)
        while left > 0:
            lengths = generator.integers(1, 1000, 200)
            # Zipf's law: the logarithm of the rank is uniform.
            ranks = np.exp(generator.random(lengths.sum()) * math.log(_PIECES - _FIRST_PIECE))
            ids = pa.array([str(number) for number in range(len(lengths))])
            writer.add(Documents(ids, ranks.astype(np.int32) - 1 + _FIRST_PIECE, lengths), 0)
            left -= int(lengths.sum()) + len(lengths)
    receipt = read_receipt(str(folder / shard_file("train", "receipt", 0, count)))
    assert receipt
    first = receipt.shard
    shards = []
    for number in range(count):
        entries = {}
        for kind in ("tfrecord", "rows", "documents"):
            name = shard_file("train", kind, number, count)
            if number:
                os.link(folder / shard_file("train", kind, 0, count), folder / name)
            entries[name] = first.files[shard_file("train", kind, 0, count)]
        shards.append(dataclasses.replace(first, files=entries))
    manifest = CacheManifest(plan, {"train": tuple(shards)}, {})
    files.write_bytes(str(folder / MANIFEST), manifest.content())


def ours(folder: str, batch_size: int):
    """Returns the trainer's batches of a cache, in global order."""
    from tasks.cache.manifest import CacheManifest
    from tasks.cache.windows import Windows
    from tasks.objectives import Lengths, span_corruption
    from tasks.vocabulary import TokenIds
    from trainer.config.phases import Phase, Phases
    from trainer.data.batches import BatchMaker, Source, TrainingBatches
    from trainer.data.features import FeatureConverter
    from trainer.data.order import GlobalOrder

    manifest = CacheManifest.load(folder)
    objective, lengths = span_corruption(), Lengths(INPUTS, TARGETS)
    windows = Windows(folder, manifest, "train", objective.window_tokens(lengths))
    vocabulary = manifest.plan.vocabulary
    ids = TokenIds(vocabulary.size, vocabulary.sentinels, b"")
    maker = BatchMaker(windows, objective, FeatureConverter(lengths, encoder_decoder=True), ids)
    order = GlobalOrder(len(windows), 0)
    return TrainingBatches([Source("", maker, order, 0)], Phases([Phase(0, batch_size, lengths)]))


def _corruption(tf):
    """Returns a TensorFlow function: tokens and four seeds -> inputs and targets, as in T5."""
    last_id = _PIECES + _SENTINELS - 1

    def segments(items, parts, seed):
        """Returns the lengths of a random split of `items` into `parts`."""
        flags = tf.cast(tf.range(items - 1) < parts - 1, tf.int32)
        draws = tf.random.stateless_uniform(tf.shape(flags), seed)
        first_in_segment = tf.pad(tf.gather(flags, tf.argsort(draws)), [[1, 0]])
        segment = tf.cumsum(first_in_segment)
        return tf.math.segment_sum(tf.ones_like(segment), segment)

    def noise_mask(length, seeds):
        size = tf.cast(length, tf.float32)
        noise = tf.cast(tf.round(size * 0.15), tf.int32)
        noise = tf.minimum(tf.maximum(noise, 1), length - 1)
        spans = tf.maximum(tf.cast(tf.round(tf.cast(noise, tf.float32) / 3.0), tf.int32), 1)
        noise_lengths = segments(noise, spans, seeds[0])
        clean_lengths = segments(length - noise, spans, seeds[1])
        lengths = tf.reshape(tf.stack([clean_lengths, noise_lengths], axis=1), [spans * 2])
        starts = tf.cumsum(lengths)[:-1]
        indicator = tf.math.unsorted_segment_sum(tf.ones_like(starts), starts, length)
        return tf.equal(tf.cumsum(indicator) % 2, 1)

    def sentinels(tokens, mask):
        before = tf.pad(mask[:-1], [[1, 0]])
        first = tf.logical_and(mask, tf.logical_not(before))
        later = tf.logical_and(mask, before)
        sentinel = last_id + 1 - tf.cumsum(tf.cast(first, tf.int32))
        return tf.boolean_mask(tf.where(first, sentinel, tokens), tf.logical_not(later))

    def corrupt(tokens, seeds):
        mask = noise_mask(tf.size(tokens), tf.reshape(tf.cast(seeds, tf.int32), [2, 2]))
        return {
            "inputs": sentinels(tokens, mask),
            "targets": sentinels(tokens, tf.logical_not(mask)),
        }

    return corrupt


def t5(folder: str, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Returns batches made by tf.data in one thread.

    Source: T5 `data/preprocessors.py` (denoise, random_spans_noise_mask,
    noise_span_to_unique_sentinel, nonnoise_span_to_unique_sentinel) and seqio's
    `dataset_providers.py`, `preprocessors.py` (append_eos_after_trim) and `feature_converters.py`
    (EncDecFeatureConverter), example by example as in seqio.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def parse(record):
        schema = {"targets": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True)}
        return tf.cast(tf.io.parse_single_example(record, schema)["targets"], tf.int32)

    def with_eos(example):
        most = {"inputs": INPUTS, "targets": TARGETS}
        return {name: tf.concat([example[name][: most[name] - 1], [1]], 0) for name in example}

    def trim_and_pad(example):
        def fit(tokens, length):
            tokens = tokens[:length]
            return tf.ensure_shape(tf.pad(tokens, [[0, length - tf.size(tokens)]]), [length])

        return {
            "inputs": fit(example["inputs"], INPUTS), "targets": fit(example["targets"], TARGETS)
        }  # fmt: skip

    def features(example):
        targets = example["targets"]
        return {
            "encoder_input_tokens": example["inputs"],
            "decoder_target_tokens": targets,
            "decoder_input_tokens": tf.concat([[0], targets[:-1]], 0),
            "decoder_loss_weights": tf.cast(tf.not_equal(targets, 0), tf.int32),
        }

    paths = sorted(str(path) for path in pathlib.Path(folder).glob("train.tfrecord-*"))
    rows = tf.data.TFRecordDataset(paths).repeat().map(parse)
    seeds = tf.data.Dataset.random(seed=0, rerandomize_each_iteration=True).batch(4)
    examples = tf.data.Dataset.zip((rows, seeds)).map(_corruption(tf)).map(with_eos)
    batches = examples.map(trim_and_pad).map(features).batch(batch_size, drop_remainder=True)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    return batches.with_options(options).as_numpy_iterator()


def measure(flags: "Flags", side: str, cache: str, threads: int) -> None:
    """Prints tokens/s and peak memory as JSON and exits; `threads=0` means the calling thread."""
    os.sched_setaffinity(0, flags.cores if threads else flags.cores[:1])
    clock: Callable[[], float] = time.perf_counter if threads else time.process_time
    if side == "T5":
        batches = t5(cache, flags.batch_size)
    else:
        made = ours(cache, flags.batch_size)
        if threads:
            batches = made.iterate(0, threads, 2 * threads)
        else:
            batches = map(made.__getitem__, range(1 << 40))
    for _ in range(4):
        batch = next(batches)
        assert batch["encoder_input_tokens"].all(), "not full"
        assert batch["decoder_target_tokens"].all(), "not full"
        assert {len(array) for array in batch.values()} == {flags.batch_size}
    speeds = []
    for _ in range(flags.repeats):
        until, begin, count = time.monotonic() + flags.seconds, clock(), 0
        while time.monotonic() < until:
            next(batches)
            count += 1
        speeds.append(count * flags.batch_size * WINDOW / (clock() - begin))
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    print(json.dumps([statistics.median(speeds), peak << 10]))
    sys.stdout.flush()
    # Exits at once, since prefetching threads still run.
    os._exit(0)


def compare(flags: "Flags", folder: pathlib.Path) -> None:
    """Runs all measurements and prints the table."""

    def child(side: str, row_tokens: int, threads: int = 0) -> tuple[float, int]:
        program = (
            "from benchmarks.input_pipeline import Flags, measure\n"
            f"measure({flags!r}, {side!r}, {str(folder / str(row_tokens))!r}, {threads})"
        )
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"{program} failed:\n{result.stderr}")
        speed, peak = json.loads(result.stdout.splitlines()[-1])
        return speed, peak

    for row_tokens in (WINDOW, flags.long_rows):
        (folder / str(row_tokens)).mkdir()
        make_cache(folder / str(row_tokens), row_tokens, int(flags.tokens), int(flags.shard_tokens))
    cores = len(flags.cores)
    runs = {
        "T5": ("T5", WINDOW),
        "ours": ("ours", WINDOW),
        f"ours, rows of {flags.long_rows}": ("ours", flags.long_rows),
    }
    found: dict[str, list[tuple[float, int]]] = {}
    for _ in range(flags.rounds):
        for name, kind in runs.items():
            found.setdefault(name, []).append(child(*kind))
    for threads in range(1, cores + 2):
        found[f"ours, {threads} threads, {cores} cores"] = [child("ours", WINDOW, threads)]
    print(machine())
    print(f"{flags.tokens:,.0f} tokens, batches of {flags.batch_size}")
    rows = []
    reference = statistics.median(speed for speed, _ in found["T5"])
    for name, results in found.items():
        speed = statistics.median(speed for speed, _ in results)
        peak = max(peak for _, peak in results)
        ratio = f"{speed / reference:.1f}"
        rows.append(
            (name, f"{speed / 1e6:.2f}", f"{speed / WINDOW:,.0f}", ratio, f"{peak / 1e6:.0f}")
        )
    header = ("pipeline", "M tokens/s", "examples/s", "ratio to T5", "peak (MB)")
    print(table(header, rows, markdown=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    tokens: float = field(1e9, "tokens in the cache")
    shard_tokens: float = field(2e7, "tokens in the shard that is written")
    long_rows: int = field(2048, "tokens per row in the third measurement", rule=at_least(1))
    batch_size: int = field(128, "examples per batch", rule=at_least(1))
    cores: tuple[int, ...] = field((0, 1), "numbers of the CPU cores to use")
    seconds: float = field(2.0, "length of an interval in seconds")
    repeats: int = field(5, "intervals per process", rule=at_least(1))
    rounds: int = field(3, "number of processes of each kind", rule=at_least(1))


def run(flags: Flags) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        compare(flags, pathlib.Path(folder))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
