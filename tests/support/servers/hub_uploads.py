"""A small local Hugging Face Hub that takes models: repositories, branches, LFS and commits.

It serves the routes that `huggingface_hub` needs to upload a folder without Xet. Files of 1,000
bytes and more go to LFS.
"""

import base64
import hashlib
import json
import re
import threading
import urllib.parse

from tests.support.servers.quiet import QuietHandler, QuietServer

TOKEN = "hf_may_write"
LARGE_BYTES = 1000
_MODEL = r"/api/models/([\w.-]+/[\w.-]+)"


class HubUploadServer(QuietServer):
    """A Hub running inside a `with` block; `url` is its address.

    Attributes:
      owner: the only namespace that `TOKEN` may write to.
      branches: repository -> branch -> path -> bytes.
      commits: (repository, branch, first line, rest of the message) of each commit.
      stored: SHA-256 -> bytes of the files in LFS.
      drop_after: number of LFS uploads after which connections are cut in the middle; None: never.
      puts: number of LFS uploads that were started.
    """

    def __init__(self, owner: str = "an"):
        self.owner = owner
        self.branches: dict[str, dict[str, dict[str, bytes]]] = {}
        self.commits: list[tuple[str, str, str, str]] = []
        self.stored: dict[str, bytes] = {}
        self.drop_after: int | None = None
        self.puts = 0
        self.lock = threading.Lock()


class _Handler(QuietHandler):
    owner: HubUploadServer

    def handle_request(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        size = int(self.headers.get("Content-Length") or 0)
        if put := re.fullmatch(r"/store/(\w+)", path):
            self.put(put[1], size)
            return
        body = self.body()
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token != TOKEN:
            self.answer(401, {"error": "Invalid credentials"})
            return
        with self.owner.lock:
            self.route(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = handle_request

    def put(self, oid, size):
        with self.owner.lock:
            self.owner.puts += 1
            drop = self.owner.drop_after is not None and self.owner.puts > self.owner.drop_after
        if drop:
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.close()
            return
        data = self.rfile.read(size)
        assert hashlib.sha256(data).hexdigest() == oid
        self.owner.stored[oid] = data
        self.answer(200)

    def route(self, path, body):
        if path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            self.batch(json.loads(body))
        elif match := re.fullmatch(rf"{_MODEL}(/.*)?", path):
            branches = self.owner.branches.get(match[1])
            if branches is None:
                self.answer(404, {"error": "no"}, X_Error_Code="RepoNotFound")
            else:
                self.repository(match[1], branches, match[2] or "", body)
        else:
            self.answer(404, {"error": path})

    def create(self, asked):
        owner, name = asked["organization"], asked["name"]
        repository = f"{owner}/{name}"
        if owner != self.owner.owner:
            self.answer(403, {"error": f"You don't have the rights to create under {owner}"})
        elif repository in self.owner.branches:
            self.answer(409, {"error": "exists", "url": f"{self.owner.url}/{repository}"})
        else:
            self.owner.branches[repository] = {"main": {}}
            self.answer(200, {"url": f"{self.owner.url}/{repository}"})

    def batch(self, asked):
        objects = []
        for each in asked["objects"]:
            upload = {"upload": {"href": f"{self.owner.url}/store/{each['oid']}"}}
            known = each["oid"] in self.owner.stored
            objects.append({**each, **({} if known else {"actions": upload})})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def repository(self, name, branches, below, body):
        if match := re.fullmatch(r"/branch/(.+)", below):
            exists = match[1] in branches
            branches.setdefault(match[1], dict(branches["main"]))
            self.answer(409 if exists else 200, {})
        elif match := re.fullmatch(r"/preupload/(.+)", below):
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["size"] >= LARGE_BYTES else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif match := re.fullmatch(r"/commit/(.+)", below):
            self.commit(name, match[1], branches, body)
        elif match := re.fullmatch(r"/tree/([^/]+)/?", below):
            files = branches.get(match[1], {})
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": "a" * 40}
                for path, data in sorted(files.items())
            ]
            self.answer(200, entries)
        elif re.fullmatch(r"(/revision/.+)?", below):
            branch = below.rpartition("/")[2] or "main"
            files = [{"rfilename": path} for path in branches.get(branch, {})]
            self.answer(200, {"id": name, "sha": "c" * 40, "siblings": files, "private": False})
        else:
            self.answer(404, {"error": below})

    def commit(self, name, branch, branches, body):
        files, header = branches[branch], {}
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                header = value
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.owner.stored[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        self.owner.commits.append((name, branch, header["summary"], header["description"]))
        url = f"{self.owner.url}/{name}/commit/{'c' * 40}"
        self.answer(200, {"commitUrl": url, "commitOid": "c" * 40, "pullRequestUrl": None})


HubUploadServer.handler = _Handler
