"""A local in-memory server of Google Cloud Storage that can inject network faults.

One port serves the JSON API (objects, simple and resumable uploads, preconditions, paged listings,
copies, batches), the XML API's GET and HEAD, the metadata server that gives a virtual machine its
token, and, for TensorFlow, whose endpoint cannot be set, CONNECT with TLS in
the name of googleapis.com. In tests:

    with GcsServer() as gcs:
        subprocess.run(…, env=os.environ | gcs.environment())   # gs://bucket exists there

By hand, it prints the variables to export and runs until it is interrupted:

    python -m tests.support.servers.gcs --port=9023 [--faults=0.05 --seed=1] [--tls=FOLDER]
    python -m tests.support.servers.gcs [--faults=0.05 --seed=1] -- COMMAND …  # while it runs
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import re
import ssl
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Collection
from typing import Any, NamedTuple

from tests.support.servers.gcs_http import Handler
from tests.support.servers.gcs_store import Store
from tests.support.servers.quiet import QuietServer

# Faults of a request. "reset": the connection breaks before anything is done; "lost": the request
# is carried out but the response is lost; "cut off": half of the response arrives.
FAULTS = ("500", "503", "429", "reset", "lost", "cut off")


class Request(NamedTuple):
    method: str
    path: str  # as sent, with its query
    range: str
    status: int  # 0: no response was sent
    sent: int  # bytes of the response's body
    fault: str

    @property
    def object(self) -> str:
        found = re.search(r"/o/([^/?]+)\?.*alt=media", self.path)
        return urllib.parse.unquote(found[1]) if found and self.method == "GET" else ""


class GcsServer(QuietServer):
    """A server of Cloud Storage, running inside a `with` block; `url` is its address.

    Args:
      store: the objects, shared with other servers; by default one with the bucket "bucket".
      port: where to listen; 0: a free port.
      faults: the share of requests that fail, chosen at random from `seed`; requests to the
        metadata server never fail, as it is local on a real machine too.
      denied: buckets that reject reads and writes.
      needs_token: rejects requests without a token, as Cloud Storage does.
      tls: a folder for a certificate authority; enables CONNECT.
    """

    handler = Handler

    def __init__(
        self,
        store: Store | None = None,
        port: int = 0,
        faults: float = 0.0,
        seed: int = 0,
        denied: Collection[str] = (),
        needs_token: bool = False,
        tls: str | pathlib.Path | None = None,
    ):
        self.store = store or Store("bucket")
        self.faults, self.denied, self.needs_token = faults, denied, needs_token
        self.requests: list[Request] = []
        self.port, self._random, self._lock = port, random.Random(seed), threading.Lock()
        self.certificates: pathlib.Path | None = None
        self.context: ssl.SSLContext | None = None
        if tls:
            self.certificates, self.context = _authority(pathlib.Path(tls))

    def environment(self) -> dict[str, str]:
        """Returns variables that point Cloud Storage clients here; with `tls`, TensorFlow too."""
        found = {
            "STORAGE_EMULATOR_HOST": self.url,  # google-cloud-storage, gcsfs, Beam
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCE_METADATA_HOST": self.address,  # google-auth, TensorFlow
            "GCE_METADATA_IP": self.address,
            "GCE_METADATA_ROOT": self.address,  # TensorStore
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        if self.certificates:
            found |= {"HTTPS_PROXY": self.url, "CURL_CA_BUNDLE": str(self.certificates)}
        return found

    def read(self, name: str, bucket: str = "bucket") -> bytes:
        return self.store.buckets[bucket][name].data

    def names(self, prefix: str = "", bucket: str = "bucket") -> list[str]:
        return sorted(name for name in self.store.buckets[bucket] if name.startswith(prefix))

    def counts(self) -> collections.Counter[str]:
        return collections.Counter(request.fault for request in self.requests)

    def fault(self) -> str:
        """Returns the next request's fault, "" for none."""
        with self._lock:
            wrong = self._random.random() < self.faults
            return self._random.choice(FAULTS) if wrong else ""

    def note(self, *fields: Any) -> None:
        with self._lock:
            self.requests.append(Request(*fields))


def _authority(folder: pathlib.Path) -> tuple[pathlib.Path, ssl.SSLContext]:
    """Returns (our certificate authority's file, a context with its googleapis.com certificate).

    Both are made once per folder.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    if not (folder / "server.pem").exists():
        key = ("-newkey", "rsa:2048", "-nodes", "-keyout")
        names = "DNS:googleapis.com,DNS:*.googleapis.com"
        (folder / "names").write_text(f"subjectAltName={names}\n")
        openssl("req", "-x509", "-days=30", "-subj=/CN=tests", *key, "ca.key", "-out", "ca.pem")
        openssl("req", "-subj=/CN=googleapis.com", *key, "server.key", "-out", "request")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30")
        openssl("x509", "-req", "-in", "request", *signing, "-extfile", "names",
                "-out", "server.pem")  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.set_alpn_protocols(["http/1.1"])
    return folder / "ca.pem", context


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.servers.gcs", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0: a free port")
    parser.add_argument("--bucket", action="append", help="a bucket to make; repeatable")
    parser.add_argument(
        "--faults", type=float, default=0.0, help="share of failing requests, 0 to 1"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of failures")
    parser.add_argument("--tls", help="folder of a certificate authority, for TensorFlow")
    parser.add_argument("command", nargs="*", help="command to run while the server runs, after --")
    given = parser.parse_args(argv)
    store = Store(*(given.bucket or ["bucket"]))
    with GcsServer(store, given.port, given.faults, given.seed, tls=given.tls) as gcs:
        if given.command:
            code = subprocess.run(given.command, env=os.environ | gcs.environment()).returncode
            failed = {fault: count for fault, count in gcs.counts().items() if fault}
            print(f"gcs_server: {len(gcs.requests):,} requests, injected faults: {failed}")
            return code
        for name, value in gcs.environment().items():
            print(f"export {name}={value}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
