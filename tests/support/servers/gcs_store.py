"""The storage of tests/support/servers/gcs.py: in-memory buckets with Cloud Storage's rules."""

import base64
import dataclasses
import fnmatch
import hashlib
import pathlib
import re
import threading
import time
from typing import Any

import google_crc32c

_PAGE = 1000
_KEPT = ("contentType", "contentEncoding", "metadata", "cacheControl", "contentDisposition")


class Answer(Exception):
    def __init__(self, status: int, message: str, reason: str = "", **headers: str):
        super().__init__(message)
        self.status, self.headers = status, headers
        errors = [{"message": message, "domain": "global", "reason": reason or message}]
        self.body = {"error": {"code": status, "message": message, "errors": errors}}


@dataclasses.dataclass
class Object:
    data: bytes
    resource: dict[str, Any]


class Store:
    """Buckets of objects; every change is atomic and has its own generation."""

    def __init__(self, *buckets: str):
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.uploads: dict[str, dict[str, Any]] = {}
        self._generation = time.time_ns() // 1000

    def bucket(self, name: str) -> dict[str, Object]:
        if name not in self.buckets:
            raise Answer(404, "The specified bucket does not exist.", "notFound")
        return self.buckets[name]

    def number(self) -> int:
        with self.lock:
            self._generation += 1
            return self._generation

    def check(self, found: Object | None, query: dict[str, str], reading: bool = False) -> None:
        """Checks an object against a request's preconditions; raises an Answer if one fails."""
        generation = found.resource["generation"] if found else "0"
        metageneration = found.resource["metageneration"] if found else "0"
        for name, now in (("Generation", generation), ("Metageneration", metageneration)):
            if query.get(f"if{name}Match", now) != now:
                raise Answer(412, "At least one of the pre-conditions you specified did not hold.",
                             "conditionNotMet")  # fmt: skip
            if query.get(f"if{name}NotMatch") == now:
                raise Answer(304 if reading else 412, "not modified", "conditionNotMet")

    def get(self, bucket: str, name: str, query: dict[str, str], reading: bool = True) -> Object:
        with self.lock:
            found = self.bucket(bucket).get(name)
            asked = query.get("generation")
            if not found or (asked and asked != found.resource["generation"]):
                raise Answer(404, f"No such object: {bucket}/{name}", "notFound")
            self.check(found, query, reading)
            return found

    def put(
        self, bucket: str, name: str, data: bytes, given: dict[str, Any], query: dict[str, str]
    ) -> dict[str, Any]:
        crc32c = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
        md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
        for key, value in (("crc32c", crc32c), ("md5Hash", md5)):
            if given.get(key, value) != value:
                raise Answer(400, f"Provided {key} doesn't match calculated {key}", "invalid")
        with self.lock:
            objects = self.bucket(bucket)
            self.check(objects.get(name), query)
            generation = str(self.number())
            now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
            resource = {
                "kind": "storage#object",
                "id": f"{bucket}/{name}/{generation}",
                "name": name,
                "bucket": bucket,
                "generation": generation,
                "metageneration": "1",
                "contentType": "application/octet-stream",
                "storageClass": "STANDARD",
                "size": str(len(data)),
                "md5Hash": md5,
                "crc32c": crc32c,
                "etag": generation,
                "timeCreated": f"{now}.{int(generation) % 1_000_000:06}Z",
                "updated": f"{now}.{int(generation) % 1_000_000:06}Z",
                **{key: given[key] for key in _KEPT if given.get(key)},
            }
            objects[name] = Object(bytes(data), resource)
            return resource

    def fill(self, folder: pathlib.Path, below: str, bucket: str = "bucket") -> None:
        """Puts the files of a folder below a name."""
        for path in folder.rglob("*"):
            if path.is_file():
                name = str(pathlib.PurePosixPath(below, path.relative_to(folder)))
                self.put(bucket, name, path.read_bytes(), {}, {})

    def fetch(self, below: str, folder: pathlib.Path, bucket: str = "bucket") -> pathlib.Path:
        """Copies what lies below a name into a folder; returns where."""
        for name, found in self.bucket(bucket).items():
            if name.startswith(f"{below}/") and not name.endswith("/"):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(found.data)
        return folder / below

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self.lock:
            self.get(bucket, name, query, reading=False)
            del self.bucket(bucket)[name]

    def copy(self, names: list[str], given: dict[str, Any], query: dict[str, str]) -> Object:
        bucket, name, to_bucket, to_name = names
        source = {"generation": query.get("sourceGeneration", "")}
        with self.lock:
            found = self.get(bucket, name, source)
            kept = {key: found.resource[key] for key in _KEPT if key in found.resource}
            self.put(to_bucket, to_name, found.data, {**kept, **given}, query)
            return self.bucket(to_bucket)[to_name]

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        """Returns a page of names from startOffset to endOffset, with folders if delimited."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        most = min(int(query.get("maxResults") or _PAGE), _PAGE)
        after = query.get("pageToken", "")
        entries: dict[str, dict[str, Any] | None] = {}
        with self.lock:
            for name, found in self.bucket(bucket).items():
                if not name.startswith(prefix) or name < query.get("startOffset", ""):
                    continue
                if query.get("endOffset") and name >= query["endOffset"]:
                    continue
                if query.get("matchGlob") and not fnmatch.fnmatchcase(name, query["matchGlob"]):
                    continue
                end = name.find(delimiter, len(prefix)) if delimiter else -1
                if end < 0:
                    entries[name] = found.resource
                    continue
                folder = name[: end + len(delimiter or "")]
                entries.setdefault(folder, None)
                if folder == name and query.get("includeTrailingDelimiter") == "true":
                    entries[name + "\0"] = found.resource
        keys = sorted(key for key in entries if key > after)
        page = keys[:most]
        answer = {
            "kind": "storage#objects",
            "items": [entry for key in page if (entry := entries[key])],
            "prefixes": [key for key in page if not entries[key]],
        }
        answer = {key: value for key, value in answer.items() if value}
        return answer | ({"nextPageToken": page[-1]} if len(keys) > most else {})


def bucket_resource(name: str) -> dict[str, Any]:
    about = {"kind": "storage#bucket", "location": "US", "storageClass": "STANDARD", "etag": "CAE="}
    return {**about, "id": name, "name": name, "metageneration": "1"}


def parts_of(content_type: str, body: bytes) -> list[tuple[dict[str, str], bytes]]:
    """Returns (headers by lower-case name, bytes) of each part of a multipart body.

    Lines may end in CRLF or, as gcsfs writes them, in LF.
    """
    boundary = re.search(r'boundary="?([^";]+)"?', content_type)
    if not boundary:
        raise Answer(400, "a multipart body without a boundary", "invalid")
    mark = b"--" + boundary[1].encode()
    after = body[body.index(mark) + len(mark) :]
    line = b"\r\n" if after.startswith(b"\r\n") else b"\n"
    found = []
    for part in (line + body).split(line + mark)[1:]:
        if part.startswith(b"--"):
            break
        head, _, data = part.partition(line + line)
        pairs = (text.partition(b":") for text in head.split(line) if b":" in text)
        headers = {key.strip().lower().decode(): value.strip().decode() for key, _, value in pairs}
        found.append((headers, data))
    return found
