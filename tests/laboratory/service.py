"""Breaks a service of batches for some minutes, while clients compare every batch.

    python -m tests.laboratory.service --cache_dir=DIR --minutes=30 --clients=8 --kills=20 --seed=7

Clients read in order, out of order, slowly, in parts, and leave at any moment. One of two servers
is killed and started again; the other one lives, and its memory is printed. Hostile tickets,
unknown and expired tokens and floods of requests come all the while. Each batch must be the one
that this process reads, each refusal one line on both sides. Exits with 1 otherwise.
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
from tests.palimpsest.annexes.batch_service.conftest import HOW
from tests.palimpsest.annexes.batch_service.test_service import hostile
from tests.support import runs

TOKEN = "a token of the laboratory"


def digest(batch) -> str:
    """Returns a hash of a batch's names, shapes and values."""
    found = hashlib.sha256()
    for name, array in batch.items():
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def token_file(folder: pathlib.Path) -> pathlib.Path:
    """Writes the file of a good token, and of one that expires in two seconds."""
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2))
    path = folder / "tokens.toml"
    entries = {"good": (TOKEN, ""), "old": ("expired", f"expires = {soon}\n")}
    path.write_text(
        "".join(
            f'[{name}]\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n{more}'
            for name, (token, more) in entries.items()
        )
    )
    return path


class Server:
    """A server on a port of its own, in a process."""

    def __init__(self, cache_dir: str, folder: pathlib.Path, name: str):
        self.port, self.log, self.errors = runs.free_port(), folder / f"{name}.jsonl", folder / name
        self._flags = (
            f"--cache_dir={cache_dir}", f"--port={self.port}", f"--tokens={token_file(folder)}",
            f"--access_log={self.log}", "--client_requests=2000", "--grace_seconds=2",
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        with self.errors.open("a") as errors:
            command = runs.command("palimpsest", "serve", *self._flags)
            self.process = runs.start(command, stdout=subprocess.PIPE, stderr=errors)
        assert "serving" in self.process.stdout.readline(), self.errors.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def megabytes(self) -> float:
        pages = pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Laboratory:
    """What is known of the batches, and what was found."""

    def __init__(self, flags: argparse.Namespace, folder: pathlib.Path):
        self.flags, self.counts, self.wrong = flags, Counter(), []
        self.local = palimpsest.batches(cache_dir=flags.cache_dir, **HOW)
        self.parts = {
            part: [digest(batch) for batch in self.local.shard(*part)] for part in ((0, 1), (1, 2))
        }
        self.servers = [Server(flags.cache_dir, folder, name) for name in ("steady", "killed")]
        self.address = ",".join(f"grpc://127.0.0.1:{each.port}" for each in self.servers)
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

    def run(self) -> None:
        """Runs until the end or the first difference; prints what there was."""
        works = [(self.read, number) for number in range(self.flags.clients)]
        works += [(self.attack, 0)] + [(self.kill, 0)] * bool(self.flags.kills)
        threads = [threading.Thread(target=self.guarded, args=work) for work in works]
        for thread in threads:
            thread.start()
        sizes = []
        while any(thread.is_alive() for thread in threads):
            sizes.append(self.servers[0].megabytes)
            time.sleep(0.5)
        for server in self.servers:
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
            if code or server.errors.read_text():
                self.wrong.append(f"a server ended with {code}: {server.errors.read_text()[:500]}")
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
