"""The request handler of tests/support/servers/gcs.py.

It serves the JSON API of Cloud Storage, some of its XML API, the metadata server of a virtual
machine, and CONNECT.
"""

import contextlib
import json
import re
import socket
import struct
import urllib.parse
from collections.abc import Callable
from typing import Any

from tests.support.servers.gcs_store import Answer, bucket_resource, parts_of
from tests.support.servers.quiet import QuietHandler

TOKEN = "a-token-of-the-metadata-server"
# The size of every part of an upload but the last is a multiple of this.
PART_BYTES = 256 << 10


class Handler(QuietHandler):
    wbufsize = -1  # sends a response's head and body together
    owner: Any  # the GcsServer
    scheme = "http"

    def handle_expect_100(self) -> bool:
        proceed = super().handle_expect_100()
        self.wfile.flush()  # without it, TensorFlow waits for a second
        return proceed

    def do_CONNECT(self) -> None:
        if not self.owner.context:
            self.send_error(501)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        inside = type("Inside", (type(self),), {"scheme": "https"})
        with contextlib.suppress(OSError):
            secure = self.owner.context.wrap_socket(self.connection, server_side=True)
            inside(secure, self.client_address, self.server)
        self.close_connection = True

    def handle_request(self) -> None:
        self.data = self._data()
        # TensorStore and others may send as POST a method that proxies do not know.
        self.method = self.headers.get("X-HTTP-Method-Override") or self.command
        url = urllib.parse.urlsplit(self.path)
        pairs = urllib.parse.parse_qsl(url.query, keep_blank_values=True)
        self.query = dict(pairs)
        self.fault, self.sent, self.status = "", 0, 0
        metadata = url.path.startswith("/computeMetadata") or url.path == "/"
        if not metadata:
            self.fault = self.owner.fault()
        try:
            if self.fault == "reset":
                self._reset()
            else:
                self._answered(url.path, metadata)
        finally:
            asked = self.headers.get("Range", "")
            self.owner.note(self.method, self.path, asked, self.status, self.sent, self.fault)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_request

    def _answered(self, path: str, metadata: bool) -> None:
        try:
            if self.fault.isdigit():
                raise Answer(int(self.fault), "We encountered an internal error. Try again.")
            if metadata:
                self._metadata(path)
            elif self.owner.needs_token and not self._has_token():
                raise Answer(401, "Anonymous caller does not have storage.objects.get access to "
                             "the Google Cloud Storage object.", "required")  # fmt: skip
            else:
                self._route(path)
        except Answer as error:
            self.send(error.status, error.body, **error.headers)

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}" or "upload_id" in self.query

    def _data(self) -> bytes:
        # TensorFlow sends both headers, and chunks.
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.body()

    def _reset(self) -> None:
        # Without lingering, the client sees a connection reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def send(self, status: int, body: Any = b"", **headers: str) -> None:
        """Sends a response, subject to the request's fault."""
        if self.fault == "lost":
            self._reset()
            return
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers.setdefault(
            "Content_Type", "text/plain" if isinstance(body, bytes) else "application/json"
        )
        self.status = status
        self.send_response(status)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            if status not in (204, 304) or not name.startswith("Content"):
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD" or status in (204, 304):
            return
        if self.fault == "cut off":
            data = data[: len(data) // 2]
            self.close_connection = True
        self.wfile.write(data)
        self.sent = len(data)

    def _metadata(self, path: str) -> None:
        last = path.rstrip("/").rpartition("/")[2]
        answers = {
            "": b"ok",
            "token": {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"},
            "project-id": b"a-project",
            "universe-domain": b"googleapis.com",
            "universe_domain": b"googleapis.com",
        }
        account = {
            "email": "account@a-project.iam.gserviceaccount.com",
            "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
            "aliases": ["default"],
        }
        found = account if "/service-accounts/" in path and last != "token" else answers.get(last)
        if found is None:
            raise Answer(404, "not found", Metadata_Flavor="Google")
        self.send(200, found, Metadata_Flavor="Google")

    def _route(self, path: str) -> None:
        path = re.sub(r"^/(?:(download)/)?storage/v1(?=/b)", "", path)
        if "/download/" in self.path:
            self.query["alt"] = "media"
        for pattern, handle in _ROUTES:
            if match := re.fullmatch(pattern, path):
                parts = [urllib.parse.unquote(part) for part in match.groups()]
                if parts and parts[0] in self.owner.denied:
                    raise Answer(403, "account@a-project.iam.gserviceaccount.com does not have "
                                 "storage.objects access to the Google Cloud Storage object. "
                                 "Permission denied on resource.", "forbidden")  # fmt: skip
                handle(self, *parts)
                return
        raise Answer(501, f"not implemented: {self.method} {self.path}")

    def _bucket(self, bucket: str) -> None:
        self.owner.store.bucket(bucket)
        self.send(200, bucket_resource(bucket))

    def _layout(self, bucket: str) -> None:
        self.owner.store.bucket(bucket)
        layout = {"kind": "storage#storageLayout", "bucket": bucket, "location": "US"}
        flat = {"hierarchicalNamespace": {"enabled": False}, "locationType": "multi-region"}
        self.send(200, layout | flat)

    def _objects(self, bucket: str) -> None:
        if self.method == "POST":
            self._upload(bucket)
        else:
            self.send(200, self.owner.store.list(bucket, self.query))

    def _object(self, bucket: str, name: str) -> None:
        store = self.owner.store
        if self.method == "DELETE":
            store.delete(bucket, name, self.query)
            self.send(204)
        elif self.query.get("alt") == "media":
            self._media(bucket, name)
        else:
            self.send(200, store.get(bucket, name, self.query).resource)

    def _media(self, bucket: str, name: str) -> None:
        found = self.owner.store.get(bucket, name, self.query)
        data, resource = found.data, found.resource
        headers = {
            "X_Goog_Hash": f"crc32c={resource['crc32c']},md5={resource['md5Hash']}",
            "X_Goog_Generation": resource["generation"],
            "ETag": f'"{resource["etag"]}"',
            "Accept_Ranges": "bytes",
            "Content_Type": resource["contentType"],
        }
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not asked or not any(asked.groups()):
            self.send(200, data, **headers)
            return
        if asked[1]:
            start, stop = int(asked[1]), min(len(data), int(asked[2] or len(data)) + 1)
        else:
            start, stop = max(0, len(data) - int(asked[2])), len(data)
        if start >= len(data):
            raise Answer(416, "The requested range cannot be satisfied.",
                         Content_Range=f"bytes */{len(data)}")  # fmt: skip
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.send(206, data[start:stop], **headers)

    def _copy_to(self, *names: str) -> None:
        self.send(200, self.owner.store.copy(list(names), self._given(), self.query).resource)

    def _rewrite_to(self, *names: str) -> None:
        made = self.owner.store.copy(list(names), self._given(), self.query).resource
        size = {"totalBytesRewritten": made["size"], "objectSize": made["size"]}
        self.send(200, {"kind": "storage#rewriteResponse", "done": True, "resource": made, **size})

    def _move_to(self, bucket: str, name: str, to_name: str) -> None:
        with self.owner.store.lock:
            made = self.owner.store.copy([bucket, name, bucket, to_name], {}, self.query)
            self.owner.store.delete(bucket, name, {})
        self.send(200, made.resource)

    def _given(self) -> dict[str, Any]:
        return json.loads(self.data) if self.data.strip() else {}

    def _upload(self, bucket: str) -> None:
        if "upload_id" in self.query:
            self._upload_part(self.query["upload_id"])
            return
        store, query = self.owner.store, self.query
        given: dict[str, Any] = {}
        kind = query.get("uploadType")
        if kind == "multipart":
            (_, about), (headers, data) = parts_of(self.headers["Content-Type"], self.data)
            given = {"contentType": headers.get("content-type"), **json.loads(about)}
        elif kind == "media":
            given, data = {"contentType": self.headers.get("Content-Type")}, self.data
        elif kind == "resumable":
            given = self._given()
            given.setdefault("contentType", self.headers.get("X-Upload-Content-Type"))
        else:
            raise Answer(400, f"uploadType is {kind!r}", "invalid")
        name = query.get("name") or given.get("name")
        if not name:
            raise Answer(400, "Required", "required")
        if kind != "resumable":
            self.send(200, store.put(bucket, name, data, given, query))
            return
        with store.lock:
            store.check(store.bucket(bucket).get(name), query)
            session = f"session-{store.number()}"
            about_it = {"at": (bucket, name), "given": given, "query": query}
            store.uploads[session] = {**about_it, "data": bytearray(), "done": None}
        joint = "&" if "?" in self.path else "?"
        place = f"{self.scheme}://{self.headers['Host']}{self.path}{joint}upload_id={session}"
        self.send(200, b"", Location=place, X_GUploader_UploadID=session)

    def _upload_part(self, session: str) -> None:
        store = self.owner.store
        with store.lock:
            upload = store.uploads.get(session)
            if not upload:
                raise Answer(404, "No such upload", "notFound")
            if self.method == "DELETE":
                del store.uploads[session]
                raise Answer(499, "The upload was cancelled")
            if not upload["done"]:
                self._take_part(upload)
        if upload["done"]:
            self.send(200, upload["done"])
        else:
            have = len(upload["data"])
            headers = {"Range": f"bytes=0-{have - 1}"} if have else {}
            self.send(308, b"", **headers)

    def _take_part(self, upload: dict[str, Any]) -> None:
        form = r"bytes (?:(\d+)-(\d+|\*)|\*)/(\d+|\*)"
        asked = re.fullmatch(form, self.headers.get("Content-Range", "").strip())
        data = upload["data"]
        if not asked:  # the whole content replaces earlier parts
            data[:] = self.data
            total: int | None = len(data)
        else:
            total = None if asked[3] == "*" else int(asked[3])
            if asked[1] is not None:
                start = int(asked[1])
                last = start + len(self.data) == total
                if start > len(data) or (len(self.data) % PART_BYTES and not last):
                    raise Answer(400, "Invalid request: a part that does not fit", "invalid")
                # Bytes that were received before are kept.
                data += self.data[len(data) - start :]
        if total is not None and len(data) >= total:
            bucket, name = upload["at"]
            whole = bytes(data)
            upload["done"] = self.owner.store.put(
                bucket, name, whole, upload["given"], upload["query"]
            )
            data.clear()

    def _batch(self) -> None:
        answers = []
        for headers, part in parts_of(self.headers["Content-Type"], self.data):
            status, body = self._one_of_batch(part)
            number = headers.get("content-id", "").strip("<>")
            answers.append(
                f"--answers\r\nContent-Type: application/http\r\n"
                f"Content-ID: <response-{number}>\r\n\r\n"
                f"HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}\r\n"
            )
        kind = "multipart/mixed; boundary=answers"
        self.send(200, ("".join(answers) + "--answers--").encode(), Content_Type=kind)

    def _one_of_batch(self, part: bytes) -> tuple[int, str]:
        store = self.owner.store
        method, target = part.lstrip().split(b"\n")[0].decode().split()[:2]
        url = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(url.query))
        copied = re.fullmatch(r"(?:/storage/v1)?" + _COPY.replace("COPY", "(?:copy|rewrite)"),
                              url.path)  # fmt: skip
        one = re.fullmatch(r"(?:/storage/v1)?/b/([^/]+)/o/(.+)", url.path)
        try:
            if method == "POST" and copied:
                made = store.copy([*map(urllib.parse.unquote, copied.groups())], {}, query)
                answer = {"done": True, "resource": made.resource}
                return 200, json.dumps(made.resource if "/copyTo/" in url.path else answer)
            if not one or method not in ("GET", "DELETE"):
                raise Answer(501, f"not implemented: {method} {target} in a batch")
            bucket, name = map(urllib.parse.unquote, one.groups())
            if method == "GET":
                return 200, json.dumps(store.get(bucket, name, query).resource)
            store.delete(bucket, name, query)
            return 204, ""
        except Answer as error:
            return error.status, json.dumps(error.body)


_COPY = r"/b/([^/]+)/o/(.+?)/COPYTo/b/([^/]+)/o/(.+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"/batch(?:/storage/v1)?", Handler._batch),
    (r"/(?:resumable/)?upload/storage/v1/b/([^/]+)/o", Handler._upload),
    (r"/b/([^/]+)", Handler._bucket),
    (r"/b/([^/]+)/storageLayout", Handler._layout),
    (r"/b/([^/]+)/o/?", Handler._objects),
    (_COPY.replace("COPY", "copy"), Handler._copy_to),
    (_COPY.replace("COPY", "rewrite"), Handler._rewrite_to),
    (r"/b/([^/]+)/o/(.+?)/moveTo/o/(.+)", Handler._move_to),
    (r"/b/([^/]+)/o/(.+)", Handler._object),
    (r"/([^/]+)/(.+)", Handler._media),
]
