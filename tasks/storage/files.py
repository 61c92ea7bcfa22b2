"""Local paths and fsspec URLs: reading, listing and atomic writing."""

import contextlib
import errno
import functools
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import IO, Any, TypeVar, cast

from tasks.storage import remote
from tasks.terminal.command_line import UserError

PARTIAL = ".partial-"
# Fewest bytes to request of a remote file: at 100 MB/s, latency of 50 ms is a third of its time.
_REQUEST_BYTES = 8 << 20
# Smaller files are uploaded in one request, which is repeated whole after a failure.
_SMALL_BYTES = 5 << 20
_STORE_THREADS = 64
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Result = TypeVar("Result")


def is_remote(path: str) -> bool:
    """Returns True for a URL such as gs://bucket/folder, False for a local path."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> str:
    """Returns `path` without the prefix file:// and with ~ expanded."""
    return os.path.expanduser(path.removeprefix("file://"))


def join(folder: str, *names: str) -> str:
    """Joins local paths or URLs with "/"."""
    return "/".join([folder.rstrip("/") or "/", *names]) if names else folder


def filesystem(path: str) -> tuple[Any, str]:
    """Returns (fsspec file system, path inside it).

    Raises:
      UserError: the URL's scheme is unknown or its package is not installed.
    """
    import fsspec

    if not is_remote(path):
        return fsspec.core.url_to_fs(local_path(path))
    # gcsfs queries the bucket's type by gRPC, before every operation if the query is not permitted.
    # Set this to true for the bucket types that need it. On an emulator the query takes 35 to 96 s.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # gcsfs logs a traceback of every error that it raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Other processes write there too, so cached listings are stale.
    fresh = {"use_listings_cache": False}
    fsspec.config.conf.setdefault("gcs", {}).update(fresh)  # for Orbax's own file system
    try:
        return fsspec.core.url_to_fs(path, **fresh)
    except (ImportError, ValueError) as error:
        hint = "; pip install 'palimpsest[gcp]'" if _on_gcs(path) else ""
        raise UserError(f"cannot open {path}: {error}{hint}") from error


def _on_gcs(path: str) -> bool:
    return path.startswith(("gs://", "gcs://"))


def on_store(path: str, action: Callable[[Any, str], Result]) -> Result:
    """Returns `action(file system, path inside it)`, repeated after transient errors.

    Raises:
      UserError: the store cannot be reached despite retries, or rejects the request: no
        credentials, no permission, no such bucket.
      FileNotFoundError: the bucket exists but the file does not.
    """
    fs, inner = filesystem(path)
    try:
        return remote.with_retries(path, lambda: action(fs, inner))
    except FileNotFoundError:
        if _on_gcs(path):
            _check_bucket(inner.partition("/")[0])
        raise
    except Exception as error:
        if advice := _advice(path, error):
            raise UserError(advice) from error
        raise


def _advice(path: str, error: Exception) -> str:
    """Returns what to do about a permanent HTTP error, "" for other errors."""
    status, _ = remote.http_status(error)
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden"):
        status = 403
    if status == 401:
        return (
            f"{path}: no credentials, or expired ones: run `gcloud auth application-default "
            "login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key file, or use a machine with a "
            "service account"
        )
    if status == 403:
        return (
            f"{path}: permission denied ({remote.describe(error)}): the account of these "
            "credentials needs the role storage.objectUser on the bucket, or "
            "storage.objectViewer to read only"
        )
    return f"{path}: {remote.describe(error)}" if 400 <= status < 500 else ""


@functools.lru_cache(maxsize=64)
def _check_bucket(bucket: str) -> None:
    """Checks that a bucket exists, when a file in it was not found.

    Raises:
      UserError: there is no such bucket.
    """
    fs, _ = filesystem(f"gs://{bucket}")

    # Readers of objects are permitted to list them, but not to query the bucket.
    def look() -> None:
        fs.call("GET", "b/{}/o", bucket, maxResults=1)

    try:
        remote.with_retries(f"gs://{bucket}", look)
    except FileNotFoundError as error:
        raise UserError(
            f"there is no bucket {bucket}: make it with `gcloud storage buckets create "
            f"gs://{bucket} --location=REGION`, in the region of the machines"
        ) from error
    except Exception as error:
        if not _advice(bucket, error):
            raise


def open_read(path: str) -> IO[bytes]:
    """Opens `path` for reading bytes; a URL is read in ranges, on demand.

    Raises:
      FileNotFoundError: there is no such file.
      UserError: see `on_store`; also raised while reading.
    """
    if not is_remote(path):
        return open(local_path(path), "rb")
    info = on_store(path, lambda fs, inner: fs.info(inner))
    if info["type"] != "file":
        raise FileNotFoundError(path)
    fetch = fetch_from_store(path, info["size"], etag(info), info)
    return io.BufferedReader(remote.File(path, info["size"], fetch), _REQUEST_BYTES)


def fetch_from_store(
    path: str, size: int, listed: str, known: dict[str, Any] | None = None
) -> remote.Fetch:
    """Returns the Fetch of a file of any fsspec store; all bytes are those of the listed file.

    The file is compared with its `size` and its `listed` etag before the first read, unless the
    store's info is `known` already, and after every failure. In Cloud Storage all ranges are read
    from the generation that was compared. Other stores are asked again after every range.
    """
    fs, inner = filesystem(path)
    found = known

    def compared() -> dict[str, Any]:
        info = fs.info(inner)
        remote.check(path, (size, listed), (info["size"], etag(info)))
        return info

    def fetch(start: int, stop: int) -> Generator[bytes, None, None]:
        nonlocal found
        info = found or compared()
        found = None  # stays None if this attempt fails: compare again before resuming
        generation = info.get("generation") if _on_gcs(path) else None
        if generation:
            try:
                data = fs.cat_file(inner, start=start, end=stop, generation=generation)
            except FileNotFoundError:
                # Overwritten since: by the same bytes, or this raises an error.
                generation = compared()["generation"]
                data = fs.cat_file(inner, start=start, end=stop, generation=generation)
                info = {**info, "generation": generation}
        else:
            data = fs.cat_file(inner, start=start, end=stop)
            info = compared()
        yield data
        found = info

    return fetch


def etag(info: dict[str, Any]) -> str:
    """Returns a checksum of a file from a store's info, else its etag, else its write time."""
    for key in ("md5Hash", "crc32c", "ETag", "etag", "generation", "mtime", "LastModified"):
        if info.get(key):
            return str(info[key]).strip('"')
    return ""


def exists(path: str) -> bool:
    """Returns True if a file or folder exists."""
    if not is_remote(path):
        return os.path.exists(local_path(path))
    try:
        on_store(path, lambda fs, inner: fs.info(inner))
    except FileNotFoundError:
        return False
    return True


def size(path: str) -> int:
    """Returns a file's size in bytes."""
    if not is_remote(path):
        return os.path.getsize(local_path(path))
    return on_store(path, lambda fs, inner: fs.info(inner))["size"]


def list_names(folder: str) -> list[str]:
    """Returns the sorted names of the files and folders in `folder`; [] if it does not exist."""
    if not is_remote(folder):
        path = local_path(folder)
        return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def listed(fs: Any, inner: str) -> list[str]:
        # An object may stand for the folder itself.
        found = [name.rstrip("/") for name in fs.ls(inner, detail=False)]
        return sorted(name.rpartition("/")[2] for name in found if name != inner.rstrip("/"))

    try:
        return on_store(folder, listed)
    except FileNotFoundError:
        return []


def list_sizes(folder: str, prefix: str = "") -> dict[str, int]:
    """Returns the sizes in bytes of the files in `folder` by name; {} if it does not exist.

    `prefix`: how the names begin. A store then lists only those.
    """
    if not is_remote(folder):
        sizes = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(local_path(folder)) as entries:
            for entry in entries:
                if entry.name.startswith(prefix) and entry.is_file():
                    with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def listed(fs: Any, inner: str) -> list[dict[str, Any]]:
        if prefix:
            return list(fs.find(inner, prefix=prefix, detail=True).values())
        return fs.ls(inner, detail=True)

    try:
        found = on_store(folder, listed)
    except FileNotFoundError:
        return {}
    named = {each["name"].rpartition("/")[2]: each for each in found if each["type"] == "file"}
    return {name: each["size"] for name, each in named.items() if name and name.startswith(prefix)}


def threads(folder: str) -> int:
    """Returns how many threads to handle the files of a folder with: a store's mostly wait."""
    return _STORE_THREADS if is_remote(folder) else os.cpu_count() or 1


def make_folder(path: str) -> None:
    """Makes the folder and its parents; object stores need none.

    Raises:
      UserError: the file system has no folders there, as in /proc.
      OSError: the folder cannot be made.
    """
    if is_remote(path):
        return
    try:
        os.makedirs(local_path(path), exist_ok=True)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no folder can be made here; choose another path") from error


@contextlib.contextmanager
def naming_full_disk(path: str) -> Iterator[None]:
    """Turns any error for a full disk, quota or file-size limit into an OSError that names `path`.

    Libraries such as safetensors and TensorStore raise their own, with the system's words inside.
    """
    try:
        yield
    except Exception as error:
        for code in _FULL:
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code), path) from error
        raise


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[IO[bytes]]:
    """Yields a file whose content appears at `path` complete, on success, or not at all.

    Locally the bytes are written beside `path`, flushed to the disk and renamed. For a remote path
    they are collected in a temporary file and uploaded as one object, since closing a half-written
    fsspec file would publish half of it. An object becomes visible once all its bytes are uploaded.

    Raises:
      UserError: there is no such folder, no file can be made in it, or `path` is a folder; or see
        `on_store`.
      OSError: the file cannot be written.
    """
    if is_remote(path):
        with tempfile.NamedTemporaryFile() as spool:
            yield spool
            spool.flush()
            on_store(path, lambda fs, inner: _upload(fs, spool.name, inner, _on_gcs(path)))
        return
    final = local_path(path)
    folder = os.path.dirname(final) or "."
    if os.path.isdir(final):
        raise UserError(f"{path} is a folder: name a file")
    aside = os.path.join(folder, f"{PARTIAL}{uuid.uuid4().hex}-{os.path.basename(final)}")
    try:
        with naming_full_disk(path), _created(aside, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, final)
        _sync_folder(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _created(aside: str, path: str) -> IO[bytes]:
    """Opens the new file `aside`; errors name `path`, which it will become."""
    try:
        return open(aside, "xb")
    except FileNotFoundError as error:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(local_path(folder)):
            raise UserError(f"{path}: there is no folder {folder}; make it first") from error
        raise UserError(f"{path}: no file can be made in this folder; choose another") from error
    except OSError as error:
        error.filename = path
        raise


def _upload(fs: Any, source: str, target: str, on_gcs: bool) -> None:
    """Uploads a file as one object; raises ChecksumError (transient) if it arrived damaged."""
    if not on_gcs:
        fs.put_file(source, target)
    elif os.path.getsize(source) > _SMALL_BYTES:
        try:
            fs.put_file(source, target, consistency="md5")
        except Exception as error:
            if type(error).__name__ == "ChecksumError":
                fs.rm_file(target)
            raise
    else:
        # put_file would send a multipart body, whose boundary it does not look for in the data.
        bucket, _, name = target.partition("/")
        with open(source, "rb") as file:
            data = file.read()
        url = fs.base.replace("/storage/", "/upload/storage/") + "b/{}/o"
        kind = {"Content-Type": "application/octet-stream"}
        fs.call("POST", url, bucket, uploadType="media", name=name, data=data, headers=kind)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: str) -> None:
    """Deletes the partial files that killed writers left in a local `folder`."""
    if is_remote(folder):
        return
    for name in list_names(folder):
        if name.startswith(PARTIAL):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(local_path(folder), name))


def remove(path: str) -> None:
    """Deletes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            on_store(path, lambda fs, inner: fs.rm_file(inner))
        else:
            os.unlink(local_path(path))


def rename(source: str, target: str) -> None:
    """Renames a file; in a store, copies it and then deletes the old one."""
    if not is_remote(source):
        os.replace(local_path(source), local_path(target))
        return
    inside = filesystem(target)[1]
    on_store(source, lambda fs, inner: fs.cp_file(inner, inside))
    remove(source)


def rename_folder(source: str, target: str) -> None:
    """Renames a folder to a name that is free; in a store, copies it and then deletes the old one.

    A copy in a store that is interrupted leaves the old folder as it was.
    """
    if not is_remote(source):
        os.rename(local_path(source), local_path(target))
        return
    inside = filesystem(target)[1]

    def copy_all(fs: Any, inner: str) -> list[str]:
        names = [name for name in fs.find(inner) if not name.endswith("/")]
        for name in names:
            fs.cp_file(name, inside + name.removeprefix(inner))
        return names

    on_store(source, copy_all)
    on_store(source, lambda fs, inner: fs.rm(inner, recursive=True))


def read_bytes(path: str) -> bytes:
    """Returns a file's bytes."""
    if is_remote(path):
        return on_store(path, lambda fs, inner: fs.cat_file(inner))
    with open_read(path) as file:
        return file.read()


def read_lines(path: str) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, one in memory at a time, without "\\n" or "\\r\\n".

    A byte-order mark, which programs on Windows write first, is no part of the first line.
    Other characters that end lines in Unicode, such as U+2028, are text: JSON does not escape them.

    Raises:
      FileNotFoundError: there is no such file.
      UserError: it is a folder or no UTF-8 text; or see `on_store`.
    """
    try:
        with open_read(path) as file:
            for number, line in enumerate(file):
                text = line.decode("utf-8" if number else "utf-8-sig")
                yield text.removesuffix("\n").removesuffix("\r")
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: name a file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text") from error


def write_bytes(path: str, data: bytes) -> None:
    """Writes a file, complete or not at all."""
    with atomic_write(path) as file:
        file.write(data)


def read_json(path: str) -> Any:
    """Parses a JSON file.

    Raises:
      UserError: it is not valid JSON (for example truncated).
    """
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): restore it from a copy") from error


def json_bytes(value: Any) -> bytes:
    """Returns indented JSON with sorted keys and a final newline; equal for equal values."""
    # Chunk by chunk: a plan of a million files would be a gigabyte of small strings at once.
    data = bytearray()
    for chunk in json.JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False).iterencode(value):
        data += chunk.encode()
    data += b"\n"
    return bytes(data)


def write_json(path: str, value: Any) -> None:
    """Writes `json_bytes(value)`, complete or not at all."""
    write_bytes(path, json_bytes(value))


def sha256(path: str) -> str:
    """Returns the hex SHA-256 of a file."""
    with open_read(path) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def copy(source: str, target: str) -> None:
    """Copies a file, complete or not at all."""
    with open_read(source) as reader, atomic_write(target) as writer:
        shutil.copyfileobj(reader, writer)
