"""Breaks a service of batches for some minutes, while clients compare every batch.

    python -m tests.laboratory.service --cache_dir=DIR --minutes=30 --clients=8 --kills=20 --seed=7

Clients read in order, out of order, slowly, in parts, and leave at any moment. One of two servers
is killed and started again; the other one lives, and its memory is printed. Hostile tickets,
unknown and expired tokens and floods of requests come all the while. Another server's cache is
extended while it is read, and another's disk is too full for the copies of a cache in a bucket.
Each batch must be the one that this process reads, each refusal one line on both sides. Exits with
1 otherwise.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter

import pyarrow as pa
import pyarrow.flight as flight

import palimpsest
from tasks.terminal.command_line import UserError
from tests.laboratory.faults import mounted
from tests.palimpsest.annexes.batch_service.conftest import HOW
from tests.palimpsest.annexes.batch_service.test_service import hostile
from tests.support import runs
from tests.support.servers.gcs import GcsServer

TOKEN = "a token of the laboratory"
GROWING = {
    "task": "python_docs_lm",
    "batch_size": 4,
    "lengths": {"targets": 32},
    "train_steps": 300,
}


def digest(batch) -> str:
    """Returns a hash of a batch's names, shapes and values."""
    found = hashlib.sha256()
    for name, array in batch.items():
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def write_tokens(path: pathlib.Path) -> None:
    """Writes a file of a good token, and of one that expires in two seconds."""
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2))
    entries = {"good": (TOKEN, ""), "old": ("expired", f"expires = {soon}\n")}
    path.write_text(
        "".join(
            f'[{name}]\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n{more}'
            for name, (token, more) in entries.items()
        )
    )


class Server:
    """A server on a port of its own, in a process."""

    def __init__(self, cache_dir: str, folder: pathlib.Path, name: str, *flags: str, **variables):
        self.port, self.log, self.errors = runs.free_port(), folder / f"{name}.jsonl", folder / name
        self.address, self._variables = f"grpc://127.0.0.1:{self.port}", variables
        if not (tokens := folder / "tokens.toml").exists():
            write_tokens(tokens)
        self._flags = (
            f"--cache_dir={cache_dir}", f"--port={self.port}", f"--tokens={tokens}",
            f"--access_log={self.log}", "--client_requests=2000", "--grace_seconds=2", *flags,
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        with self.errors.open("a") as errors:
            command = runs.command("palimpsest", "serve", *self._flags)
            self.process = runs.start(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **self._variables},
            )
        assert "serving" in self.process.stdout.readline(), self.errors.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, expected: str = "nothing") -> str:
        """Stops the server; returns its fault, or "". Lines with `expected` are none."""
        self.process.send_signal(signal.SIGTERM)
        code, lines = self.process.wait(60), self.errors.read_text().splitlines()
        told = [line for line in lines if expected not in line]
        return f"a server ended with {code}: {told[-4:]}" if code or told else ""

    @property
    def megabytes(self) -> float:
        pages = pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Laboratory:
    """The expected batches, the servers, and all differences found."""

    def __init__(self, flags: argparse.Namespace, folder: pathlib.Path):
        self.flags, self.counts, self.wrong = flags, Counter(), []
        self.local = palimpsest.batches(cache_dir=flags.cache_dir, **HOW)
        self.parts = {
            part: [digest(batch) for batch in self.local.shard(*part)] for part in ((0, 1), (1, 2))
        }
        self.servers = [Server(flags.cache_dir, folder, name) for name in ("steady", "killed")]
        self.address = ",".join(each.address for each in self.servers)
        self.folder = folder
        self.growing: Server | None = None
        self.end = time.monotonic() + 60 * flags.minutes

    def over(self) -> bool:
        return time.monotonic() > self.end or bool(self.wrong)

    def guarded(self, work, number: int) -> None:
        try:
            while not self.over():
                work(random.Random(f"{self.flags.seed} {work.__name__} {number} {self.counts}"))
        except Exception as error:
            self.wrong.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def check(self, part: tuple[int, int], k: int, batch) -> None:
        self.counts["batches compared"] += 1
        if digest(batch) != self.parts[part][k]:
            self.wrong.append(f"batch {k} of part {part} is another")

    def read(self, draw: random.Random) -> None:
        """Reads as one client, which then leaves."""
        part = draw.choice([*self.parts])
        remote = palimpsest.batches(self.address, **HOW).shard(*part)
        slow = draw.random() < 0.2
        if draw.random() < 0.3:
            for k in draw.choices(range(1000), k=20):
                self.check(part, k, remote[k])
        remote.state = begin = draw.randrange(900)
        count = draw.choice((1, 5, 300)) if not slow else 20
        with contextlib.closing(iter(remote)) as made:
            for k, batch in zip(range(begin, min(1000, begin + count)), made, strict=False):
                self.check(part, k, batch)
                time.sleep(0.3 * slow)
        self.counts["clients that came and left"] += 1

    def attack(self, draw: random.Random) -> None:
        """Sends what must be refused."""
        port = draw.choice(self.servers).port
        with flight.connect(f"grpc://127.0.0.1:{port}") as raw:
            for content, _ in draw.sample([*hostile(self.local.config)], 20):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                token = draw.choices((TOKEN, "unknown", "expired"), (8, 1, 1))[0]
                self.refused(raw, data, token)
            for _ in range(300):
                self.refused(raw, os.urandom(draw.choice((0, 10, 70_000))), "unknown")

    def refused(self, raw: flight.FlightClient, data: bytes, token: str) -> None:
        header = [(b"authorization", f"Bearer {token}".encode())]
        options = flight.FlightCallOptions(headers=header, timeout=60)
        try:
            raw.do_get(flight.Ticket(data), options).read_chunk()
        except (pa.ArrowException, OSError) as error:
            told = getattr(error, "extra_info", b"").decode()
            if "Traceback" in str(error) or "\n" in told or "the server failed" in told:
                self.wrong.append(f"told {error!s:.300}")
            self.counts["refused" if told else "unreachable"] += 1
        else:
            self.wrong.append(f"answered {data!r:.200}")

    def kill(self, draw: random.Random) -> None:
        """Kills a server, and starts it again."""
        pause = 60 * self.flags.minutes / (self.flags.kills + 1)
        time.sleep(draw.uniform(0.5, 1.0) * max(0.1, pause - 2))
        if not self.over():
            self.servers[1].kill()
            self.counts["kills"] += 1
            self.servers[1].start()

    def extend(self, draw: random.Random) -> None:
        """Extends a cache while it is read: its batches are as before, or are refused."""
        corpus, cache_dir = self.folder / "corpus", self.folder / "caches"
        corpus.mkdir(exist_ok=True)
        (corpus / f"{time.time_ns()}.txt").write_text("".join(f"{draw.random()}\n" * 30))
        vocabulary = f"--vocabulary={pathlib.Path(self.flags.cache_dir).parent}/vocabulary"
        build = runs.command(
            *("pipeline.build", "--task=python_docs_lm", f"--corpus=text:{corpus}/*.txt"),
            *(f"--cache_dir={cache_dir}", vocabulary, "--shard_bytes=4000"),
            *["--extend"] * cache_dir.exists(),
        )
        if not cache_dir.exists():
            subprocess.run(build, cwd=runs.ROOT, check=True, capture_output=True)
            self.growing = Server(str(cache_dir), self.folder, "growing")
            return
        before = palimpsest.batches(cache_dir=str(cache_dir), **GROWING)
        expected = [digest(before[k]) for k in range(GROWING["train_steps"])]
        remote = palimpsest.batches(self.growing.address, **GROWING)
        building = runs.start(build, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        told, k = "", 0
        while not told and k < len(expected) and (k < 5 or building.poll() is None or k % 50):
            try:
                if digest(remote[k]) != expected[k]:
                    self.wrong.append(f"batch {k} changed as its cache was extended")
            except UserError as error:
                told = str(error)
            k += 1
            self.counts["batches compared while a cache is extended"] += 1
        if building.wait() or "\n" in told or "the server failed" in told:
            self.wrong.append(f"extending: {building.stderr.read()[-500:]} {told}")
        self.counts["extensions"] += 1
        self.counts["extensions that a client was told of"] += bool(told)

    def fill(self, draw: random.Random) -> None:
        """Reads from a server whose disk is too small for its copies, then makes room."""
        folder = self.folder / "copies"
        with GcsServer() as bucket, mounted(folder, "size=64m") as remount:
            bucket.store.fill(pathlib.Path(self.flags.cache_dir), "cache")
            shards = pathlib.Path(self.flags.cache_dir).rglob("*.tfrecord-*")
            size = max(path.stat().st_size for path in shards)
            if not remount:
                self.counts["full disks: mounting is not permitted"] += 1
                time.sleep(60)
                return
            remount(f"size={int(size * draw.uniform(0.1, 0.9))}")
            flags = (f"--local_dir={folder}", "--kept_bytes=0")
            server = Server(
                "gs://bucket/cache", self.folder, "full", *flags, **bucket.environment()
            )
            try:
                remote = palimpsest.batches(server.address, **HOW)
                self.check((0, 1), 3, remote[3])
            except UserError as error:
                if f"{folder}" not in str(error) or "\n" in str(error):
                    self.wrong.append(f"a full disk: {error}")
                self.counts["full disks told"] += 1
            remount("size=64m")
            remote = palimpsest.batches(server.address, **HOW)
            for k in draw.choices(range(1000), k=5):
                self.check((0, 1), k, remote[k])
            self.wrong += filter(None, [server.stop("was not copied in advance")])
        time.sleep(draw.uniform(0, 20))

    def run(self) -> None:
        """Runs until the end or the first difference; prints what there was."""
        works = [(self.read, number) for number in range(self.flags.clients)]
        works += [(self.attack, 0), (self.extend, 0), (self.fill, 0)]
        works += [(self.kill, 0)] * bool(self.flags.kills)
        threads = [threading.Thread(target=self.guarded, args=work) for work in works]
        for thread in threads:
            thread.start()
        sizes = []
        while any(thread.is_alive() for thread in threads):
            sizes.append(self.servers[0].megabytes)
            time.sleep(0.5)
        for server in filter(None, (*self.servers, self.growing)):
            self.wrong += filter(None, [server.stop()])
            lines = [json.loads(line) for line in server.log.read_text().splitlines()]
            self.counts.update(f"log: {line['status']}" for line in lines)
        for name, count in sorted(self.counts.items()):
            print(f"{name}: {count:,}")
        tenths = (sizes[len(sizes) * tenth // 10] for tenth in range(1, 10))
        shown = " ".join(f"{size:.0f}" for size in (*tenths, sizes[-1]))
        print(f"memory of the steady server after each tenth of the time, in MB: {shown}")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.laboratory.service")
    parser.add_argument("--cache_dir", required=True, help="folder of the cache python_docs_*")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    os.environ["PALIMPSEST_TOKEN"] = TOKEN
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(flags, pathlib.Path(folder))
        laboratory.run()
    for line in laboratory.wrong:
        print(f"difference: {line}", file=sys.stderr)
    print(f"{len(laboratory.wrong)} differences")
    return 1 if laboratory.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
