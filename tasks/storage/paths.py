"""Local paths, and the URLs of fsspec's stores."""

import os


def is_remote(path: str) -> bool:
    """Returns True for a URL such as gs://bucket/folder, False for a local path."""
    return "://" in path and not path.startswith("file://")


def is_on_gcs(path: str) -> bool:
    """Returns True for a URL of Google Cloud Storage."""
    return path.startswith(("gs://", "gcs://"))


def local_path(path: str) -> str:
    """Returns `path` without the prefix file:// and with ~ expanded."""
    return os.path.expanduser(path.removeprefix("file://"))


def join(folder: str, *names: str) -> str:
    """Joins local paths or URLs with "/"."""
    return "/".join([folder.rstrip("/") or "/", *names]) if names else folder
