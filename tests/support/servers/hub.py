"""A small local Hugging Face Hub that can inject network faults.

It serves the routes that are needed to read a data set: repository, revision, tree, paths-info and
resolve, with ranges. Point HF_ENDPOINT at `url` before huggingface_hub is imported. Files of 1,000
bytes and more are "large": resolve redirects to another server, as the Hub does.
"""

import functools
import hashlib
import json
import pathlib
import random
import re
import threading
import time
import urllib.parse

from tests.support.servers.quiet import QuietHandler, QuietServer

REPOSITORY = "an/owner"
COMMIT = "c0ffee" * 6 + "abcd"
TOKEN = "hf_secret_of_mine"
LARGE_BYTES = 1000

# Faults of a request; "short" applies only to the bytes of a file.
FAULTS = ("429", "503", "500", "dropped", "cut off", "short", "slow")


class HubServer(QuietServer):
    """A Hub with one data set, an/owner, running inside a `with` block; `url` is its address.

    Args:
      folder: the files of the data set; or, if `several`, a folder OWNER/NAME for each data set.
      access: "private" and "gated" need `TOKEN`, "public" needs none. An account without access
        ("hf_other") sees the repository of a gated data set but not its files.
      faults: the share of requests that fail, chosen at random from `seed`.
      always: a fault of every request for a file below data/, or None.
      latency: seconds before each answer.
      bandwidth: bytes per second of a connection, 0 for any number.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        access: str = "private",
        faults: float = 0,
        seed: int = 0,
        always: str | None = None,
        several: bool = False,
        latency: float = 0,
        bandwidth: float = 0,
    ):
        self.folder, self.access, self.faults, self.always = folder, access, faults, always
        self.several = several
        self.failing = ""  # a pattern of the paths whose requests all fail
        self.latency, self.bandwidth = latency, bandwidth
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.seen: list[tuple[str, str, str]] = []  # method, path, fault

    def folder_of(self, repository: str) -> pathlib.Path | None:
        """Returns the folder of a data set; None if there is none."""
        if not self.several:
            return self.folder if repository == REPOSITORY else None
        folder = self.folder / repository
        return folder if folder.is_dir() else None

    def fault(self, method: str, path: str) -> str:
        of_a_file = "/resolve/" in path or path.startswith("/large/")
        with self.lock:
            chosen = self.random.choice(FAULTS) if self.random.random() < self.faults else ""
            chosen = (
                self.always
                if self.always and path.startswith(f"/datasets/{REPOSITORY}/resolve/{COMMIT}/data/")
                else chosen
            )
            if self.failing and re.search(self.failing, path):
                chosen = "503"
            if chosen == "short" and not (of_a_file and method == "GET"):
                chosen = "dropped"
            self.seen.append((method, path, chosen))
        return chosen


@functools.lru_cache
def _digest(path: pathlib.Path, written: int, kind: str) -> str:
    return hashlib.new(kind, path.read_bytes()).hexdigest()


class _Handler(QuietHandler):
    owner: HubServer

    def handle_request(self):
        self.data = self.body()
        time.sleep(self.owner.latency)
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.fault = self.owner.fault(self.command, path)
        if self.fault in ("429", "503", "500"):
            headers = {"Retry_After": "0.05"} if self.fault == "429" else {}
            self.answer(int(self.fault), b"busy", **headers)
        elif self.fault == "dropped":
            self.close_connection = True
        else:
            self.route(path)

    do_GET = do_POST = do_HEAD = handle_request

    def route(self, path):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if match := re.fullmatch(r"/large/([^/]+/[^/]+)/(.+)", path):  # a signed URL, no token
            assert not token, "a token went to another server"
            self.file(self.owner.folder_of(match[1]) / match[2], etag="of-the-store")
            return
        match = re.fullmatch(r"(?:/api)?/datasets/([^/]+/[^/]+)(/.*)?", path)
        folder = match and self.owner.folder_of(match[1])
        if not folder:
            self.answer(401 if not token else 404, {"error": "no"}, X_Error_Code="RepoNotFound")
            return
        if self.owner.access == "private" and token != TOKEN:
            self.answer(401, {"error": "no"}, X_Error_Code="RepoNotFound")
            return
        if self.owner.access == "gated" and "/resolve/" in path and token != TOKEN:
            self.answer(403 if token else 401, X_Error_Code="GatedRepo")
            return
        repository, below = match[1], match[2] or ""
        self.folder, self.repository = folder, repository
        if match := re.fullmatch(r"(?:/revision/(.+))?", below):
            if match[1] in (None, "main", COMMIT):
                self.answer(200, {"id": repository, "sha": COMMIT, "private": True, "tags": []})
            else:
                self.answer(404, {"error": "no"}, X_Error_Code="RevisionNotFound")
        elif match := re.fullmatch(r"/tree/\w+(?:/(.*))?", below):
            found = folder / (match[1] or "")
            names = sorted(found.iterdir()) if found.is_dir() else []
            self.answer(200, [self.entry(name) for name in names])
        elif re.fullmatch(r"/paths-info/\w+", below):
            try:
                wanted = json.loads(self.data)["paths"]
            except ValueError:
                wanted = urllib.parse.parse_qs(self.data.decode())["paths"]
            found = [folder / name for name in wanted]
            self.answer(200, [self.entry(name) for name in found if name.exists()])
        elif match := re.fullmatch(r"/resolve/\w+/(.+)", below):
            self.resolve(folder / match[1], match[1])
        else:
            self.answer(404, {"error": "no"}, X_Error_Code="EntryNotFound")

    def entry(self, path):
        name = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"type": "directory", "oid": "b" * 40, "size": 0, "path": name}
        data = path.read_bytes()
        entry = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
        if len(data) >= LARGE_BYTES:
            oid = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
        return {**entry, "path": name}

    def resolve(self, path, name):
        if not path.is_file():
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        size = path.stat().st_size
        if size >= LARGE_BYTES and self.command == "GET":
            tag = _digest(path, path.stat().st_mtime_ns, "sha256")
            headers = {"X_Linked_ETag": f'"{tag}"', "X_Linked_Size": str(size)}
            # Another host name makes it another server for the client.
            place = f"http://localhost:{self.server.server_port}/large/{self.repository}/{name}"
            self.answer(302, Location=place, X_Repo_Commit=COMMIT, **headers)
        else:
            tag = _digest(path, path.stat().st_mtime_ns, "sha1")
            self.file(path, tag, X_Repo_Commit=COMMIT)

    def file(self, path, etag, **headers):
        size = path.stat().st_size
        headers["ETag"] = f'"{etag}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            self.answer(200, path.read_bytes(), **headers)
            return
        start, stop = int(asked[1]), min(size, int(asked[2] or size) + 1)
        if start >= stop:
            self.answer(416, Content_Range=f"bytes */{size}", **headers)
            return
        if self.fault == "short":
            stop -= (stop - start) // 2
        span = f"bytes {start}-{stop - 1}/{size}"
        with path.open("rb") as file:
            file.seek(start)
            self.answer(206, file.read(stop - start), Content_Range=span, **headers)

    def send_data(self, data):
        if self.fault == "cut off":
            data = data[: len(data) // 2]
            self.close_connection = True
        step = max(1, len(data) // 4) if self.fault == "slow" else len(data) or 1
        bandwidth, begun = self.owner.bandwidth, time.monotonic()
        if bandwidth:
            step = min(step, 1 << 18)
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            time.sleep(0.01 if self.fault == "slow" else 0)
            if bandwidth:
                due = begun + min(start + step, len(data)) / bandwidth
                time.sleep(max(0.0, due - time.monotonic()))


HubServer.handler = _Handler
