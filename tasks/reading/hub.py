"""Data sets of the Hugging Face Hub, as files to stream.

Only the driver resolves a data set; workers read `hf://datasets/REPOSITORY@COMMIT/PATH` with the
token that huggingface_hub finds on their own machine (HF_TOKEN, or its store). All goes through
huggingface_hub's own session, tried again as `remote` says.
"""

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterator
from typing import Any

from tasks.reading.sources import VALIDATION, CorpusSpec, SourceFile
from tasks.storage import remote
from tasks.terminal.command_line import UserError

_TIMEOUT_SECONDS = 30
# A Hub that has never answered in this run is more likely a machine without a network than a Hub
# that is about to recover.
_FIRST_CONTACT_SECONDS = 30
_PATHS_PER_REQUEST = 100
_TIMEOUTS = ("connect", "read", "write", "pool")
_TOKEN = "HF_TOKEN (or `hf auth login`)"
_INSTEAD = "or read files that you have: --corpus=parquet:FILES"
_FORMATS = ("parquet", "json", "text")


def list_files(spec: CorpusSpec) -> tuple[CorpusSpec, str, list[SourceFile]]:
    """Returns the spec with its revision pinned to a commit, the files' format, and the files.

    Raises:
      UserError: the Hub is out of reach, the data set cannot be accessed (a private one without a
        token), it has no such revision or configuration, or its files are of another format.
    """
    name = spec.location
    try:
        with _patient_session(f"hf:{name}"):
            commit, form, splits, states = _list(spec)
    except UserError:
        raise
    except Exception as error:  # the Hub's client and its HTTP library have dozens of kinds
        raise _explain(spec, error) from error
    if form not in _FORMATS or not all(splits.values()):
        raise UserError(
            f"{spec} holds {form} files; only parquet, JSON lines and text are read. The Hub may "
            f"have a parquet copy: try --corpus=hf:{name}@refs/convert/parquet"
        )
    pinned = dataclasses.replace(spec, revision=commit)
    return pinned, form, [
        _source_file(name, commit, split, states[path])
        for split in sorted(splits)
        for path in sorted(splits[split])
    ]  # fmt: skip


def _list(spec: CorpusSpec) -> tuple[str, str, dict[str, list[str]], dict[str, Any]]:
    """Commit, format, paths by split, and what the Hub says of each path."""
    from huggingface_hub import HfApi

    api, name = HfApi(), spec.location
    commit = api.dataset_info(name, revision=spec.revision or None).sha or ""
    builder = _builder(name, spec.config, commit)
    splits = {
        str(split): [url.partition(f"@{commit}/")[2] for url in urls]
        for split, urls in (builder.config.data_files or {}).items()
    }
    paths = [path for urls in splits.values() for path in urls]
    states = {
        info.path: info
        for start in range(0, len(paths), _PATHS_PER_REQUEST)
        for info in api.get_paths_info(
            name,
            paths[start : start + _PATHS_PER_REQUEST],
            revision=commit,
            repo_type="dataset",
        )
    }
    return commit, builder.name, splits, states


@contextlib.contextmanager
def _patient_session(what: str) -> Iterator[None]:
    """Has every request to the Hub in the block tried again, those too that `datasets` makes.

    It would take an answer that is late for a missing README and find other files without it.
    """
    from huggingface_hub import constants, get_session

    session: Any = get_session()
    usual = session.send
    answered = False
    failures: list[UserError] = []

    def send(request: Any, **options: Any) -> Any:
        if not str(request.url).startswith(constants.ENDPOINT):
            return usual(request, **options)
        given = request.extensions.get("timeout") or {}
        timeouts = {kind: given.get(kind) or _TIMEOUT_SECONDS for kind in _TIMEOUTS}
        request.extensions = {**request.extensions, "timeout": timeouts}

        def once() -> Any:
            nonlocal answered
            response = usual(request, **options)
            answered = True
            if response.headers.get("X-Error-Code") == "GatedRepo":
                failures.append(_gated(what, response.status_code))
            if response.status_code in remote.RETRIED or response.status_code >= 500:
                response.close()
                raise remote.Refused(response.status_code, response.headers)
            return response

        try:
            wait = lambda: math.inf if answered else _FIRST_CONTACT_SECONDS  # noqa: E731
            return remote.patiently(what, once, seconds=wait)
        except UserError as error:
            away = "" if answered else "the Hugging Face Hub cannot be reached: "
            failures.append(UserError(f"{away}{error}, {_INSTEAD}"))
            raise

    session.send = send
    try:
        yield
    finally:
        del session.send
        if failures:  # whatever was made of it
            raise failures[0]


def _gated(name: str, status: int) -> UserError:
    if status == 403:
        return UserError(
            f"{name} is gated and the account of your token has no access: ask for it on the data "
            f"set's page and run again, {_INSTEAD}"
        )
    return UserError(f"{name} is gated: ask for access there, then set {_TOKEN}, {_INSTEAD}")


def _builder(name: str, config: str, commit: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset_builder(name, config or None, revision=commit)


def _source_file(name: str, commit: str, split: str, info: Any) -> SourceFile:
    state = {"sha256": info.lfs.sha256} if info.lfs else {"etag": info.blob_id}
    own = VALIDATION if split in ("validation", "valid", "val", "dev") else split
    url = f"hf://datasets/{name}@{commit}/{info.path}"
    return SourceFile(url, info.path, own, info.size, state)


def _explain(spec: CorpusSpec, error: Exception) -> UserError:
    from huggingface_hub import errors

    chain: list[BaseException] = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    name = f"hf:{spec.location}"
    if any(isinstance(link, errors.RevisionNotFoundError) for link in chain):
        return UserError(f"{name} has no revision {spec.revision}")
    if any(isinstance(link, errors.RepositoryNotFoundError) for link in chain) or (
        "DatasetNotFoundError" in kinds
    ):
        return UserError(
            f"{name} does not exist or cannot be accessed: if it is private, set {_TOKEN} of an "
            f"account with access, {_INSTEAD}"
        )
    reason = remote.said(error)
    if kinds & {"ConnectError", "ConnectionError", "TimeoutException", "OfflineModeIsEnabled"}:
        return UserError(
            f"the Hugging Face Hub cannot be reached for {name} ({reason}), {_INSTEAD}"
        )
    return UserError(f"{name} cannot be read: {reason}")


def fetch_from_hub(path: str, size: int, etag: str) -> remote.Fetch:
    """Returns the Fetch of `hf://datasets/REPOSITORY@COMMIT/PATH`; every answer is checked.

    One request a range, and none of the Hub's API, which counts them.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    name, _, rest = path.removeprefix("hf://datasets/").partition("@")
    commit, _, inner = rest.partition("/")
    url = hf_hub_url(name, inner, repo_type="dataset", revision=commit)

    def fetch(start: int, stop: int) -> Generator[bytes, None, None]:
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
        headers["Accept-Encoding"] = "identity"
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as answer:
            _check_answer(path, size, etag, answer)
            if answer.status_code != 206 and start:
                raise UserError(f"{path} cannot be read: the server gives no ranges of bytes")
            left = stop - start
            for chunk in answer.iter_raw():
                yield chunk[:left]
                left -= len(chunk)
                if left <= 0:  # a server that gives no ranges goes on
                    return

    return fetch


def _check_answer(path: str, size: int, etag: str, answer: Any) -> None:
    """Raises what an answer that is an error means, or that it is of another file."""
    status = answer.status_code
    if status in (401, 403):
        raise UserError(
            f"{path} may not be read (HTTP {status}): every machine that reads it needs {_TOKEN} "
            "of an account with access; give the same command again then"
        )
    if status == 404:
        raise UserError(f"{path} is no longer there (HTTP 404)")
    if status >= 400 and status != 416:
        raise remote.Refused(status, answer.headers)
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if answer.status_code == 200:
        total = answer.headers.get("Content-Length", "")
    # A large file is elsewhere; the Hub, which is asked first, says its checksum.
    first = [*answer.history, answer][0]
    tag = first.headers.get("X-Linked-ETag") or first.headers.get("ETag", "")
    found = int(total) if total.isdecimal() else size
    remote.check(path, (size, etag), (found, tag.removeprefix("W/").strip('"')))
    if status == 416:
        raise remote.Refused(status, answer.headers)
