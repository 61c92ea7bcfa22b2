"""How long steps wait for rows of a cache in a bucket, by bandwidth, latency and order.

    python -m benchmarks.remote_input [--step_seconds=0.25] [--steps=60] [--bandwidths=…]

A server of tests/gcs_server.py on this machine sends so many bytes a second, all connections
together, each answer after a latency. A process takes batches of 128 x (512 -> 114) from the
trainer's own input, copies on an empty disk, sleeps for the time of a step after each, and says
for what share of its time it waited for a batch. Bandwidths are given as multiples of what the run
reads: batch_size * 568 tokens a step, about two bytes each. What counts is that ratio, shard times
and latency, so small shards at little bandwidth stand for large ones at much.

  start    seconds from opening the cache to the first batch
  waiting  share of the time after it
  read     bytes that came through the line for each byte that the batches hold
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.input_pipeline import WINDOW, make_cache, source
from tests.gcs_server import GcsServer
from tests.gcs_store import Store

_CACHE = "gs://bucket/cache"


def measure(flags: argparse.Namespace) -> None:
    """Takes batches and prints what it was like, as JSON."""
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
    os._exit(0)  # batches are being made ahead


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.remote_input", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step_seconds", type=float, default=0.25)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--bandwidths", default="0.4,1.5,3,10", help="times what the run reads")
    parser.add_argument("--latencies", default="0,0.05", help="seconds")
    parser.add_argument("--side", help=argparse.SUPPRESS)
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
    print(f"{size / 1e6:.1f} MB in {flags.shards} shards, {need / 1e6:.2f} MB/s are used")
    print(f"{'order':>8}{'bandwidth':>11}{'latency':>9}{'start':>9}{'waiting':>9}{'read':>7}")
    for side in ("block", "global"):
        for times in map(float, flags.bandwidths.split(",")):
            for latency in map(float, flags.latencies.split(",")):
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
                print(
                    f"{side:>8}{times:>10.1f}x{latency * 1e3:>6.0f} ms{found['start']:>7.1f} s"
                    f"{found['waiting']:>9.1%}{read:>7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
