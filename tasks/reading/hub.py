"""Data sets on the Hugging Face Hub, read as streamed files.

Only the driver resolves a data set; workers read `hf://datasets/REPOSITORY@COMMIT/PATH` with the
token that huggingface_hub finds on their own machine (HF_TOKEN, or its store). All requests use
huggingface_hub's session and are retried (`retries`).
"""

import contextlib
import csv
import dataclasses
import functools
import math
import re
from collections.abc import Collection, Generator, Iterator
from typing import Any

from tasks.reading.corpus import CSV, DIALECT_OPTIONS, NO_QUOTE, VALIDATION, CorpusSpec, SourceFile
from tasks.reading.splits import VALIDATION_NAMES
from tasks.storage import ranges, retries, store
from tasks.terminal import extras
from tasks.terminal.command_line import UserError

_TIMEOUT_SECONDS = 30
# If the Hub has not answered once in this run, the machine probably has no network.
_FIRST_CONTACT_SECONDS = 30
_PATHS_PER_REQUEST = 100
_EXPIRED = (400, 401, 403, 404, 410)  # statuses of an address that was valid for a while
_TIMEOUTS = ("connect", "read", "write", "pool")
_TOKEN = "HF_TOKEN (or `hf auth login`)"
_INSTEAD = "or read local files: --corpus=parquet:FILES"


def list_files(
    spec: CorpusSpec, formats: Collection[str]
) -> tuple[CorpusSpec, str, list[SourceFile]]:
    """Returns the spec with its revision pinned to a commit, the files' format, and the files.

    Raises UserError if the Hub cannot be reached, the data set cannot be accessed (private, and
    no token is set), its revision or configuration does not exist, or its files have none of the
    `formats`.
    """
    name = spec.location
    try:
        with _retrying_session(f"hf:{name}"):
            commit, builder, splits, states = _list(spec)
    except UserError:
        raise
    except Exception as error:  # the Hub's client and its HTTP library raise dozens of kinds
        raise _explain(spec, error) from error
    form = builder.name
    if form not in formats or not all(splits.values()):
        raise UserError(
            f"{spec} holds {form} files; only {', '.join(formats)} can be read. The Hub may have a "
            f"parquet copy: try --corpus=hf:{name}@refs/convert/parquet"
        )
    found = []
    for split, paths in sorted(splits.items()):
        own = VALIDATION if split in VALIDATION_NAMES else split
        for path in sorted(paths):
            info = states[path]
            state = {"sha256": info.lfs.sha256} if info.lfs else {"etag": info.blob_id}
            folder = f"hf://datasets/{name}@{commit}/"
            found.append(SourceFile(folder, info.path, own, info.size, state))
    return dataclasses.replace(_with_dialect(spec, builder), revision=commit), form, found


def _list(spec: CorpusSpec) -> tuple[str, Any, dict[str, list[str]], dict[str, Any]]:
    """Returns the commit, the builder, paths by split, and the Hub's info by path."""
    with extras.needed(f"hf:{spec.location}", "pipeline"):
        import datasets
        from huggingface_hub import HfApi

    api, name = HfApi(), spec.location
    commit = api.dataset_info(name, revision=spec.revision or None).sha or ""
    datasets.disable_progress_bars()
    builder = datasets.load_dataset_builder(name, spec.config or None, revision=commit)
    splits = {
        str(split): [url.partition(f"@{commit}/")[2] for url in urls]
        for split, urls in (builder.config.data_files or {}).items()
    }
    paths = [path for urls in splits.values() for path in urls]
    states = {}
    for start in range(0, len(paths), _PATHS_PER_REQUEST):
        some = paths[start : start + _PATHS_PER_REQUEST]
        for info in api.get_paths_info(name, some, revision=commit, repo_type="dataset"):
            states[info.path] = info
    return commit, builder, splits, states


def _with_dialect(spec: CorpusSpec, builder: Any) -> CorpusSpec:
    """Fills in the delimiter, quote and columns of CSV files.

    Options missing from the spec come from the data set's README, or are the `datasets` defaults.
    """
    given = [name for name in DIALECT_OPTIONS if getattr(spec, name)]
    if builder.name != CSV:
        if given:
            raise UserError(f"{spec} holds {builder.name} files, which do not take ?{given[0]}=")
        return spec
    asked = builder.config
    columns = spec.columns or ",".join(map(str, asked.names or ()))
    usual = {"skiprows": None, "skipfooter": 0, "doublequote": True, "skipinitialspace": False}
    unusual = [name for name, value in usual.items() if getattr(asked, name, value) != value]
    if asked.header not in ("infer", None if columns else 0):
        unusual.append("header")
    if (asked.encoding or "utf-8").lower().replace("_", "-") not in ("utf-8", "utf8", "utf-8-sig"):
        unusual.append("encoding")
    if unusual:
        raise UserError(
            f"the README of {spec} sets {unusual[0]} for its CSV files, which is not supported: "
            f"try the Hub's parquet copy, --corpus=hf:{spec.location}@refs/convert/parquet"
        )
    quote = NO_QUOTE if asked.quoting == csv.QUOTE_NONE else asked.quotechar
    delimiter, quote = spec.delimiter or asked.sep, spec.quote or quote
    return dataclasses.replace(spec, columns=columns, delimiter=delimiter, quote=quote)


@contextlib.contextmanager
def _retrying_session(what: str) -> Iterator[None]:
    """Retries every request to the Hub inside the block, including requests that `datasets` makes.

    `datasets` treats a timeout as a missing README, and would then find different files.
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
            if retries.is_retried(response.status_code):
                response.close()
                raise retries.HttpError(response.status_code, response.headers)
            return response

        try:
            wait = lambda: math.inf if answered else _FIRST_CONTACT_SECONDS  # noqa: E731
            return retries.with_retries(what, once, seconds=wait)
        except UserError as error:
            prefix = "" if answered else "the Hugging Face Hub cannot be reached: "
            failures.append(UserError(f"{prefix}{error}, {_INSTEAD}"))
            raise

    session.send = send
    try:
        yield
    finally:
        del session.send
        if failures:  # the cause of any error that the block raised
            raise failures[0]


def _gated(name: str, status: int) -> UserError:
    why = "gated: request access on its page, then set " + _TOKEN
    if status == 403:
        why = (
            "gated and your token's account has no access: request it on the data set's page "
            "and run again"
        )
    return UserError(f"{name} is {why}, {_INSTEAD}")


def _explain(spec: CorpusSpec, error: Exception) -> UserError:
    kinds = retries.class_names(retries.causes(error, contexts=True))
    name = f"hf:{spec.location}"
    if "RevisionNotFoundError" in kinds:
        return UserError(f"{name} has no revision {spec.revision}")
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return UserError(
            f"{name} does not exist or cannot be accessed: if it is private, set {_TOKEN} for an "
            f"account with access, {_INSTEAD}"
        )
    reason = retries.describe(error)
    if "OfflineModeIsEnabled" in kinds:
        return UserError(f"{name} cannot be read while HF_HUB_OFFLINE is set: unset it, {_INSTEAD}")
    if "Config name is missing" in reason:
        known = re.search(r"available configs: \[([^\]]*)\]", reason)
        listed = f", one of {known[1].replace(chr(39), '')}" if known else ""
        return UserError(f"{name} has several configurations: name one as {name}:CONFIG{listed}")
    why = f"{name} cannot be read: {reason}"
    if kinds & {"ConnectError", "ConnectionError", "TimeoutException"}:
        why = f"the Hugging Face Hub cannot be reached for {name} ({reason}), {_INSTEAD}"
    return UserError(why)


@functools.lru_cache
def fetch_from_hub(path: str, size: int, etag: str) -> ranges.Fetch:
    """Returns the Fetch for `hf://datasets/REPOSITORY@COMMIT/PATH`; every response is checked.

    Each range is one request, and none goes to the Hub's rate-limited API. A large file is in
    another store, to which the Hub redirects the first request; the others go there at once, while
    that address is valid. What it holds is named by its checksum.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    name, _, rest = path.removeprefix("hf://datasets/").partition("@")
    commit, _, inner = rest.partition("/")
    url = hf_hub_url(name, inner, repo_type="dataset", revision=commit)

    store_url = ""

    def fetch(start: int, stop: int) -> Generator[bytes, None, None]:
        nonlocal store_url
        asked = store_url
        headers = {} if asked else build_hf_headers()
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        stream = get_session().stream
        with stream("GET", asked or url, headers=headers, timeout=_TIMEOUT_SECONDS) as answer:
            if asked and answer.status_code in _EXPIRED:
                store_url = ""
                yield from fetch(start, stop)
                return
            _check_answer(path, size, "" if asked else etag, answer)
            if answer.history:
                store_url = str(answer.url)
            if answer.status_code != 206 and start:
                raise UserError(f"{path} cannot be read: the server does not serve byte ranges")
            left = stop - start
            for chunk in answer.iter_raw():
                yield chunk[:left]
                left -= len(chunk)
                if left <= 0:  # a server that ignores ranges sends the whole file
                    return

    return fetch


def _check_answer(path: str, size: int, etag: str, answer: Any) -> None:
    status = answer.status_code
    if status in (401, 403):
        raise UserError(
            f"{path} may not be read (HTTP {status}): every machine that reads it needs {_TOKEN} "
            "for an account with access; set it, then run the same command again"
        )
    if status == 404:
        raise UserError(f"{path} no longer exists (HTTP 404)")
    if status >= 400 and status != 416:
        raise retries.HttpError(status, answer.headers)
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if status == 200:
        total = answer.headers.get("Content-Length", "")
    # Large files are redirected; the first response, the Hub's own, has the checksum.
    first = [*answer.history, answer][0]
    tag = first.headers.get("X-Linked-ETag") or first.headers.get("ETag", "")
    found = int(total) if total.isdecimal() else size
    store.check_same(path, (size, etag), (found, tag.removeprefix("W/").strip('"')))
    if status == 416:
        raise retries.HttpError(status, answer.headers)
