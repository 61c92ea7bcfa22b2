"""Data sets of the Hugging Face Hub, against a small Hub on this machine."""

import hashlib
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import urllib.parse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = pathlib.Path(__file__).parents[2]
COMMIT = "c0ffee" * 6 + "abcd"
TOKEN = "hf_secret_of_mine"


class Hub(http.server.BaseHTTPRequestHandler):
    """The few routes of the Hub that reading a data set takes; every repository is private."""

    protocol_version = "HTTP/1.1"
    folder: pathlib.Path

    def log_message(self, *arguments):
        pass

    def answer(self, code, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if not isinstance(body, bytes):
            headers["Content_Type"] = "application/json"
        self.send_response(code)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "no"}, X_Error_Code="RepoNotFound")
        elif match := re.fullmatch(r"/api/datasets/an/owner(?:/revision/(.+))?", path):
            if match[1] in (None, "main", COMMIT):
                self.answer(200, {"id": "an/owner", "sha": COMMIT, "private": True, "tags": []})
            else:
                self.answer(404, {"error": "no"}, X_Error_Code="RevisionNotFound")
        elif match := re.fullmatch(r"/api/datasets/an/owner/tree/\w+(?:/(.*))?", path):
            found = self.folder / (match[1] or "")
            names = sorted(found.iterdir()) if found.is_dir() else []
            self.answer(200, [self.entry(name) for name in names])
        elif re.fullmatch(r"/api/datasets/an/owner/paths-info/\w+", path):
            try:
                wanted = json.loads(body)["paths"]
            except ValueError:
                wanted = urllib.parse.parse_qs(body.decode())["paths"]
            found = [self.folder / name for name in wanted]
            self.answer(200, [self.entry(name) for name in found if name.exists()])
        elif match := re.fullmatch(r"/datasets/an/owner/resolve/\w+/(.+)", path):
            self.file(self.folder / match[1])
        else:
            self.answer(404, {"error": "no"}, X_Error_Code="RepoNotFound")

    def entry(self, path):
        name = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"type": "directory", "oid": "b" * 40, "size": 0, "path": name}
        oid = hashlib.sha1(path.read_bytes()).hexdigest()
        return {"type": "file", "oid": oid, "size": path.stat().st_size, "path": name}

    def file(self, path):
        if not path.is_file():
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        data = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": COMMIT}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            self.answer(200, data, **headers)
            return
        start, stop = int(asked[1]), min(len(data), int(asked[2] or len(data)) + 1)
        span = f"bytes {start}-{stop - 1}/{len(data)}"
        self.answer(206, data[start:stop], Content_Range=span, **headers)

    do_GET = do_POST = do_HEAD = handle_request


@pytest.fixture
def hub(tmp_path):
    """Runs Python code, or a module's command, with this Hub as the Hub."""
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    handler = type("OurHub", (Hub,), {"folder": folder})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(*arguments, token="", endpoint=f"http://127.0.0.1:{server.server_port}"):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HF_")
        }
        environment.update(HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "home"), HF_TOKEN=token)
        environment["NO_PROXY"] = environment["no_proxy"] = "127.0.0.1"
        return subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
        )

    run.folder = folder
    yield run
    server.shutdown()
    server.server_close()


READ = """
import json, pickle, sys
from tasks import sources
corpus = sources.resolve(sources.parse(sys.argv[1]))
rows = [
    (split, *row.values())
    for piece in pickle.loads(pickle.dumps(corpus.pieces))
    for split, batch in sources.read(corpus, piece)
    for row in batch.to_pylist()
]
print(json.dumps([corpus.record, rows]))
assert b"hf_secret_of_mine" not in pickle.dumps(corpus)
"""


def test_a_private_data_set_is_read_with_a_token_and_pinned(hub):
    for split, texts in (("train", ["one", "two"]), ("validation", ["three"])):
        table = pa.table({"id": [f"{split}{i}" for i in range(len(texts))], "text": texts})
        pq.write_table(table, hub.folder / f"data/{split}-00000-of-00001.parquet")
    done = hub("-c", READ, "hf:an/owner", token=TOKEN)
    assert done.returncode == 0, done.stderr
    record, rows = json.loads(done.stdout)
    assert rows == [
        ["train", "train0", "one", None],
        ["train", "train1", "two", None],
        ["validation", "validation0", "three", None],
    ]
    assert record["spec"] == f"hf:an/owner@{COMMIT}"
    assert [file["name"] for file in record["files"]] == [
        "data/train-00000-of-00001.parquet",
        "data/validation-00000-of-00001.parquet",
    ]
    assert all(file["etag"] for file in record["files"])
    pinned = hub("-c", READ, f"hf:an/owner@{COMMIT}", token=TOKEN)
    assert json.loads(pinned.stdout)[0] == record


def test_json_lines_of_the_hub_are_read(hub):
    text = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50))
    (hub.folder / "data/train.jsonl").write_text(text)
    done = hub("-c", READ, "hf:an/owner?validation=0", token=TOKEN)
    assert done.returncode == 0, done.stderr
    assert [row[2] for row in json.loads(done.stdout)[1]] == [f"document {i}" for i in range(50)]


def refused(done):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert TOKEN not in done.stderr
    (line,) = done.stderr.splitlines()
    return line


def train(tmp_path, corpus):
    return ("-m", "vocab.train", f"--corpus={corpus}", f"--output={tmp_path / 'out'}")


def test_without_access_one_line_says_what_to_do(hub, tmp_path):
    (hub.folder / "data/train.jsonl").write_text('{"text": "x"}\n')
    line = refused(hub(*train(tmp_path, "hf:an/owner")))
    assert "set HF_TOKEN" in line
    assert "--corpus=parquet:FILES" in line
    assert "set HF_TOKEN" in refused(hub(*train(tmp_path, "hf:an/owner"), token="hf_wrong"))
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_one_line_too(hub, tmp_path):
    (hub.folder / "data/train.csv").write_text("text\nx\n")

    def line(corpus):
        return refused(hub(*train(tmp_path, corpus), token=TOKEN))

    assert "holds csv files" in line("hf:an/owner")
    (hub.folder / "data/train.csv").rename(hub.folder / "data/train.jsonl")
    assert "has no revision nope" in line("hf:an/owner@nope")
    assert "'nope' not found" in line("hf:an/owner:nope")


def test_a_hub_out_of_reach_is_one_line_soon(hub, tmp_path):
    done = hub(*train(tmp_path, "hf:an/owner"), endpoint="http://127.0.0.1:9")
    assert "cannot be reached" in refused(done)
