"""Object stores through fsspec: requests with retries, and files read in ranges."""

import base64
import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Generator
from typing import IO, Any, TypeVar

from tasks.storage import retries
from tasks.storage.paths import is_on_gcs, is_remote, local_path
from tasks.storage.ranges import REQUEST_BYTES, open_ranges
from tasks.terminal import extras
from tasks.terminal.command_line import UserError

# Smaller files are uploaded in one request, which is repeated whole after a failure.
_SMALL_BYTES = 5 << 20
_BLOCK_BYTES = 50 << 20
_BINARY = "application/octet-stream"

CHAIN = "::"  # between the URLs of fsspec's chains
ARCHIVES = "of an archive, all files are read: give its own path, or unpack it"

Result = TypeVar("Result")


def filesystem(path: str) -> tuple[Any, str]:
    """Returns (fsspec file system, path inside it).

    Raises UserError if the URL's scheme is unknown or its package is not installed.
    """
    import fsspec

    if not is_remote(path):
        local = fsspec.filesystem("file")
        return local, local._strip_protocol(local_path(path))
    if CHAIN in path:  # fsspec would open the first part alone
        raise UserError(f"cannot open {path}: chains of URLs are not read; {ARCHIVES}")
    # gcsfs queries the bucket's type over gRPC, before every operation if the query is forbidden.
    # Set this to true for the bucket types that need it. On an emulator the query takes 35 to 96 s.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # gcsfs logs a traceback for every error that it raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Other processes write there too, so cached listings may be stale.
    fresh = {"use_listings_cache": False}
    fsspec.config.conf.setdefault("gcs", {}).update(fresh)  # for Orbax's own file system
    try:
        return fsspec.core.url_to_fs(path, **fresh)
    except (ImportError, ValueError) as error:
        hint = f"; {extras.install('gcp')}" if is_on_gcs(path) else ""
        raise UserError(f"cannot open {path}: {error}{hint}") from error


class Store:
    """A file or folder in a store. Its methods repeat requests after transient errors.

    All of them raise:
      UserError: the store cannot be reached despite retries, or rejects the request: no
        credentials, no permission, no such bucket.
      FileNotFoundError: the bucket exists but the file does not.
    """

    def __init__(self, url: str):
        self._url = url
        self._fs, self._inside = filesystem(url)

    def ask(self, action: Callable[[Any, str], Result]) -> Result:
        """Returns `action(file system, path inside it)`."""
        try:
            return retries.with_retries(self._url, lambda: action(self._fs, self._inside))
        except FileNotFoundError:
            if is_on_gcs(self._url):
                _check_bucket(self._inside.partition("/")[0])
            raise
        except Exception as error:
            if advice := _advice(self._url, error):
                raise retries.Unreachable(advice) from error
            raise

    def info(self) -> dict[str, Any]:
        return self.ask(lambda fs, inside: fs.info(inside))

    def open(self, listed: tuple[int, str] | None = None, ahead: int = REQUEST_BYTES) -> IO[bytes]:
        """Opens a file for reading and seeking; ranges are requested on demand.

        `listed` is the listing's (size, etag); None accepts the current file. A request has at
        least `ahead` bytes; 0 requests exactly the bytes read. Opening and reading raise UserError
        if the file has changed.
        """
        known = None
        if listed is None:
            known = self.info()
            if known["type"] != "file":
                raise FileNotFoundError(self._url)
            _check_encoding(self._url, known)
            listed = known["size"], etag(known)
        fetch = functools.partial(self._fetch, listed, {"info": known})
        return open_ranges(self._url, listed[0], fetch, ahead)

    def _fetch(
        self, listed: tuple[int, str], state: dict[str, Any], start: int, stop: int
    ) -> Generator[bytes, None, None]:
        """Yields a range of the listed file.

        The file is compared with the listing before the first read, unless its info is already
        known, and after every failure. In Cloud Storage all ranges are read from the compared
        generation. Other stores are queried again after every range.
        """
        info = state["info"] or self._compared(listed)
        state["info"] = None  # stays None if this attempt fails: compare again before resuming
        generation = info.get("generation") if is_on_gcs(self._url) else None
        if generation:
            cat = functools.partial(self._fs.cat_file, self._inside, start=start, end=stop)
            try:
                data = cat(generation=generation)
            except FileNotFoundError:
                # Overwritten since: by the same bytes, or this raises an error.
                generation = self._compared(listed)["generation"]
                data = cat(generation=generation)
                info = {**info, "generation": generation}
        else:
            data = self._fs.cat_file(self._inside, start=start, end=stop)
            info = self._compared(listed)
        yield data
        state["info"] = info

    def _compared(self, listed: tuple[int, str]) -> dict[str, Any]:
        info = self._fs.info(self._inside)
        _check_encoding(self._url, info)
        check_same(self._url, listed, (info["size"], etag(info)))
        return info

    def current(self) -> str:
        """Returns the generation of an object of Cloud Storage; "" if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return str(self.info()["generation"])
        return ""

    def generation(self) -> tuple[str, bytes]:
        """Returns the (generation, content) of an object of Cloud Storage; ("", b"") if none."""
        with contextlib.suppress(FileNotFoundError):
            info = self.info()
            return str(info["generation"]), self.ask(lambda fs, inside: fs.cat_file(inside))
        return "", b""

    def replace(self, data: bytes, generation: str, mark: bytes = b"") -> str:
        """Writes an object of Cloud Storage if it still has this generation, "" for none.

        Returns the new generation, or "" if another writer came first. If the answer to a write was
        lost, the object has a different generation but holds `mark`, by default all of `data`.
        """

        def upload(fs: Any, inside: str) -> str:
            bucket, _, name = inside.partition("/")
            match = {"ifGenerationMatch": generation or "0", "json_out": True}
            return str(post(fs, bucket, name, data, "application/json", **match)["generation"])

        with contextlib.suppress(FileExistsError):  # HTTP 412, as gcsfs raises it
            return self.ask(upload)
        now, found = self.generation()
        return now if (mark or data) in found else ""

    def upload(self, source: str, check: Callable[[], None] | None = None) -> str:
        """Uploads a file as one object; returns its generation if it is known.

        `check` may raise an error before the upload. In Cloud Storage, the upload fails if the
        object has changed since; then, unless it has the same bytes, `check` is called again.
        """
        if not is_on_gcs(self._url):
            if check:
                check()
            self.ask(lambda fs, inside: fs.put_file(source, inside))
            return ""
        while True:
            before = None
            if check:
                before = self.current()
                check()
            try:
                return self.ask(functools.partial(_upload, source=source, generation=before))
            except FileExistsError:  # HTTP 412: another writer, or a lost answer
                if self.info().get("md5Hash") == _md5(source):
                    return ""

    def remove(self, generation: str) -> None:
        """Deletes an object of Cloud Storage if it still has this generation.

        Raises FileNotFoundError if there is none.
        """

        def delete(fs: Any, inside: str) -> None:
            bucket, _, name = inside.partition("/")
            fs.call("DELETE", "b/{}/o/{}", bucket, name, ifGenerationMatch=generation)
            fs.invalidate_cache(fs._parent(inside))

        with contextlib.suppress(FileExistsError):
            self.ask(delete)


def _check_encoding(url: str, info: dict[str, Any]) -> None:
    """Raises UserError for an object that Cloud Storage decompresses on its way: no ranges fit."""
    if info.get("contentEncoding") == "gzip":
        raise UserError(
            f"{url} has Content-Encoding: gzip, so Cloud Storage may decompress it on its way: "
            "clear that with `gcloud storage objects update --clear-content-encoding`, and let its "
            "name end in .gz"
        )


def _advice(path: str, error: Exception) -> str:
    status, _ = retries.http_status(error)
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden"):
        status = 403
    if status == 401:
        return (
            f"{path}: no credentials, or expired ones: run `gcloud auth application-default "
            "login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key file's path, or use a machine "
            "with a service account"
        )
    if status == 403:
        return (
            f"{path}: permission denied ({retries.describe(error)}): the account of these "
            "credentials needs the role storage.objectUser on the bucket, or "
            "storage.objectViewer to read only"
        )
    return f"{path}: {retries.describe(error)}" if 400 <= status < 500 else ""


@functools.lru_cache(maxsize=64)
def _check_bucket(bucket: str) -> None:
    fs, _ = filesystem(f"gs://{bucket}")
    # Readers of objects are permitted to list them, but not to query the bucket.
    look = functools.partial(fs.call, "GET", "b/{}/o", bucket, maxResults=1)
    try:
        retries.with_retries(f"gs://{bucket}", look)
    except FileNotFoundError as error:
        raise retries.Unreachable(
            f"there is no bucket {bucket}: make it with `gcloud storage buckets create "
            f"gs://{bucket} --location=REGION`, in the region of the machines"
        ) from error
    except Exception as error:
        if not _advice(bucket, error):
            raise


def _upload(fs: Any, target: str, source: str, generation: str | None) -> str:
    """Uploads a file as one object to Cloud Storage; returns the object's new generation.

    With a `generation`, "" for no object, raises FileExistsError if the object has another one.
    Raises ChecksumError (transient) if the file arrived damaged.
    """
    from fsspec.asyn import sync
    from gcsfs.checkers import ChecksumError
    from gcsfs.core import upload_chunk

    bucket, _, name = target.partition("/")
    match = {} if generation is None else {"ifGenerationMatch": generation or "0"}
    size = os.path.getsize(source)
    with open(source, "rb") as file:
        if size <= _SMALL_BYTES:
            # put_file would send a multipart body without checking whether its boundary occurs in
            # the data.
            made = post(fs, bucket, name, file.read(), _BINARY, json_out=True, **match)
        else:
            headers, _ = sync(
                *(fs.loop, fs._call, "POST", _upload_url(fs), bucket),
                **{"uploadType": "resumable", "name": name, "json": {"name": name}, **match},
                headers={"X-Upload-Content-Type": _BINARY},
            )
            begin = 0
            while block := file.read(_BLOCK_BYTES):
                place = headers["Location"]
                made = sync(fs.loop, upload_chunk, fs, place, block, begin, size, _BINARY)
                begin += len(block)
    fs.invalidate_cache(fs._parent(target))
    if made["md5Hash"] != _md5(source):
        fs.rm_file(target)
        raise ChecksumError(f"{target} arrived damaged")
    return str(made["generation"])


def _md5(source: str) -> str:
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, functools.partial(hashlib.md5, usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode()


def _upload_url(fs: Any) -> str:
    return fs.base.replace("/storage/", "/upload/storage/") + "b/{}/o"


def post(fs: Any, bucket: str, name: str, data: bytes, kind: str, **more: Any) -> Any:
    """Writes an object to Cloud Storage in one request."""
    more |= {"uploadType": "media", "name": name, "data": data}
    return fs.call("POST", _upload_url(fs), bucket, headers={"Content-Type": kind}, **more)


def etag(info: dict[str, Any]) -> str:
    """Returns a file's checksum from a store's info, else its etag, else its write time."""
    for key in ("md5Hash", "crc32c", "ETag", "etag", "generation", "mtime", "LastModified"):
        if info.get(key):
            return str(info[key]).strip('"')
    return ""


def check_same(path: str, listed: tuple[int, str], found: tuple[int, str]) -> None:
    """Raises UserError if a store's (size, etag) differs from the listing's; "" equals any etag."""
    sizes, tags = zip(listed, found, strict=True)
    if sizes[0] != sizes[1]:
        difference = f"it had {sizes[0]:,} bytes and now has {sizes[1]:,}"
    elif all(tags) and tags[0] != tags[1]:
        difference = f"its etag was {tags[0]} and is now {tags[1]}"
    else:
        return
    raise UserError(
        f"{path} has changed since the corpus was listed ({difference}): restore the file, or "
        "start over in another folder"
    )
