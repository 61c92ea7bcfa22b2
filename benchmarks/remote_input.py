"""Measures how long steps wait for a cache in a bucket, by bandwidth, latency and order.

    python -m benchmarks.remote_input [--step_seconds=0.25] [--steps=60] [--bandwidths=…]

A local server, tests/gcs_server.py, limits the bandwidth of all connections together and delays
each answer by a latency. A separate process reads batches of 128 x (512 -> 114) with the trainer's
input pipeline and no local copies yet. After each batch it sleeps for --step_seconds, and in the
end reports the share of its time spent waiting for batches. Bandwidths are multiples of the rate at
which the run reads: batch_size * 568 tokens per step, about two bytes each. Results depend only on
that ratio, the latency, and the time to read a shard, so small shards at a low bandwidth represent
large shards at a high one.

  start    seconds from opening the cache to the first batch
  waiting  share of the time after the first batch spent waiting
  read     bytes read from the server per byte of the batches' windows
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.input_pipeline import WINDOW, make_cache, source
from benchmarks.machine import machine
from tasks.terminal import progress
from tasks.terminal.command_line import Parser, positive
from tasks.terminal.table import table
from tests.gcs_server import GcsServer
from tests.gcs_store import Store

_CACHE = "gs://bucket/cache"


def measure(flags: argparse.Namespace) -> None:
    """Reads batches, prints start and waiting as JSON, then ends the process."""
    from trainer.data.batches import TrainingBatches
    from trainer.data.order import BlockOrder

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as local:
        read = source(_CACHE, local)
        if flags.side == "block":
            windows = read.maker.windows
            order = BlockOrder(windows.blocks(windows.bytes // 8), 0)
            read = dataclasses.replace(read, order=order)
        taken = TrainingBatches([read], flags.batch_size).iterate(0)
        next(taken)
        first = time.monotonic()
        for _ in range(flags.steps):
            time.sleep(flags.step_seconds)
            next(taken)
        spent = time.monotonic() - first
    waited = spent - flags.steps * flags.step_seconds
    print(json.dumps({"start": first - began, "waiting": waited / spent}), flush=True)
    os._exit(0)  # at once, since prefetching threads still run


def main() -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.remote_input", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--batch_size", type=positive, default=128, help="examples per batch")
    add("--steps", type=positive, default=60, help="steps of a measurement")
    add("--step_seconds", type=float, default=0.25, help="seconds of a step without waiting")
    add("--shards", type=positive, default=64, help="shards of the cache")
    add("--bandwidths", default="0.4,1.5,3,10", help="multiples of the rate at which a run reads")
    add("--latencies", default="0,0.05", help="latencies in seconds, separated by commas")
    add("--side", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side:
        measure(flags)
    tokens = flags.steps * flags.batch_size * WINDOW
    store = Store("bucket")
    with tempfile.TemporaryDirectory() as folder:
        make_cache(pathlib.Path(folder), 2048, tokens, tokens / flags.shards)
        for path in pathlib.Path(folder).iterdir():
            store.put("bucket", f"cache/{path.name}", path.read_bytes(), {}, {})
    names = [name for name in store.buckets["bucket"] if ".tfrecord" in name or ".rows" in name]
    size = sum(len(store.buckets["bucket"][name].data) for name in names)
    need = size / flags.steps / flags.step_seconds
    print(machine())
    print(f"{size / 1e6:.1f} MB in {flags.shards} shards, {need / 1e6:.2f} MB/s are read")
    bandwidths, latencies = (
        map(float, text.split(",")) for text in (flags.bandwidths, flags.latencies)
    )
    cases = list(itertools.product(("block", "global"), bandwidths, latencies))
    rows = []
    with progress.shown("measuring", len(cases)) as bar:
        for side, times, latency in cases:
            line = {"latency_seconds": latency, "bytes_per_second": times * need}
            with GcsServer(store, **line) as gcs:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.remote_input", f"--side={side}",
                     f"--steps={flags.steps}", f"--step_seconds={flags.step_seconds}",
                     f"--batch_size={flags.batch_size}"],
                    env=os.environ | gcs.environment(), stdout=subprocess.PIPE, check=True,
                )  # fmt: skip
                found = json.loads(done.stdout)
                read = sum(request.sent for request in gcs.requests) / size
            rows.append(
                [
                    *(side, f"{times:.1f}x", f"{latency * 1e3:.0f} ms"),
                    *(f"{found['start']:.1f} s", f"{found['waiting']:.1%}", f"{read:.2f}"),
                ]
            )
            bar.update(len(rows))
    print(table(("order", "bandwidth", "latency", "start", "waiting", "read"), rows))


if __name__ == "__main__":
    main()
