"""A build on Google Cloud Dataflow: what is checked before, and what travels with the job.

Workers get our packages as a wheel that is made here, of the very files that this process runs, and
which asks for the versions that are installed here: they write what this machine would write.
The rest of the job is Beam's. Tokens do not travel: see pipeline/runners/secret.py.
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
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import GoogleCloudOptions

RUNNER = "DataflowRunner"
# What a worker runs. Apache Beam is not among the packages: it is the image's.
_OURS = ("pipeline", "tasks", "vocab")
_PACKAGES = (
    "datasets", "fsspec", "gcsfs", "google-crc32c", "numba", "numpy", "pyarrow", "rich",
    "sentencepiece", "zstandard",
)  # fmt: skip
_GO_ON = "what is finished is kept, give the same command again to go on"
_LONGEST_JOB_NAME = 63
# The same files make the same wheel, which Beam then need not upload again.
_TIME = (1980, 1, 1, 0, 0, 0)


def is_runner(runner: str) -> bool:
    """Whether a --runner is Dataflow's."""
    return runner.rsplit(".", 1)[-1] == RUNNER


def check(arguments: list[str], corpus: sources.CorpusSpec, cache_dir: str) -> None:
    """Finds out before anything is read or submitted what would let the job fail later.

    Args:
      arguments: Beam's.
      corpus: what the workers will read.
      cache_dir: where they will write.

    Raises:
      UserError: a flag is missing or of no use there, or there are no credentials.
    """
    try:
        from google.cloud import dataflow  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--runner={RUNNER} needs Beam's parts for Google Cloud, which are not installed: "
            "pip install 'palimpsest[gcp]'"
        ) from error
    given = _options(arguments)
    missing = [name for name in ("project", "region", "temp_location") if not getattr(given, name)]
    if missing:
        flags = " ".join(f"--{name}=…" for name in missing)
        raise UserError(f"--runner={RUNNER} needs {flags} too; see docs/dataflow.md")
    for name in ("temp_location", "staging_location"):
        value = getattr(given, name)
        # Beam would put a bucket that it makes in the place of a folder of this machine.
        if value and not re.match("gs://[^/]", value):
            raise UserError(f"--{name}={value} is not in Cloud Storage: give gs://BUCKET/FOLDER")
    if not files.is_remote(cache_dir):
        raise UserError(
            f"--cache_dir={cache_dir} is a folder of this machine, which Dataflow's workers do not "
            "see: give gs://BUCKET/FOLDER"
        )
    if corpus.kind not in ("hf", "python_docs") and not files.is_remote(corpus.location):
        raise UserError(
            f"the corpus {corpus} is on this machine, where Dataflow's workers cannot read it: "
            "copy it first, gcloud storage cp --recursive FOLDER gs://BUCKET/"
        )
    if given.update:
        raise UserError(
            "--update is for streaming jobs: cancel the job, then give the new command; "
            "finished shards are kept"
        )
    if given.template_location:
        raise UserError(
            "--template_location makes no job that builds a cache: the corpus is listed before, "
            "and the cache completed after it, on the machine that submits it"
        )
    if given.job_name and not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", given.job_name):
        raise UserError(
            f"--job_name={given.job_name}: use small letters, digits and hyphens, a letter first"
        )
    if not given.no_auth:
        _check_credentials()


def _options(arguments: list[str]) -> "GoogleCloudOptions":
    from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

    return PipelineOptions(arguments).view_as(GoogleCloudOptions)


def _check_credentials() -> None:
    """Beam itself would try for half a minute and go on without any."""
    import google.auth
    from google.auth import exceptions

    try:
        google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    except exceptions.DefaultCredentialsError as error:
        raise UserError(
            "there are no Google Cloud credentials: run `gcloud auth application-default login`, "
            "or set GOOGLE_APPLICATION_CREDENTIALS to the key of a service account "
            f"({' '.join(str(error).split())[:200]})"
        ) from error


@contextlib.contextmanager
def prepared(arguments: list[str], folder: str) -> Iterator[list[str]]:
    """Yields Beam's arguments for a job that writes to `folder`, with our packages and a name.

    The name follows from the folder, and Dataflow runs one job of a name at a time: no cache is
    built twice at once. The wheel is there until the block ends.
    """
    with tempfile.TemporaryDirectory() as temporary:
        more = [f"--extra_package={wheel(pathlib.Path(temporary))}"]
        if not _options(arguments).job_name:
            more.append(f"--job_name={job_name(folder)}")
        yield [*arguments, *more]


def job_name(folder: str) -> str:
    """Returns the name of the job that writes to `folder`: its last part, and a hash of it all."""
    name = re.sub("[^a-z0-9]+", "-", f"palimpsest-{folder.rstrip('/').rpartition('/')[2].lower()}")
    suffix = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_JOB_NAME - 9].rstrip('-')}-{suffix}"


def wheel(folder: pathlib.Path) -> pathlib.Path:
    """Writes a wheel of our packages, as they are here, into `folder`; returns its path.

    Source: the wheel format, packaging.python.org/specifications/binary-distribution-format.
    """
    version = _version()
    name = f"palimpsest-{version}"
    root = pathlib.Path(__file__).parents[2]
    content = {
        str(path.relative_to(root)): path.read_bytes()
        for package in _OURS
        for path in sorted((root / package).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    requirements = [f"Requires-Dist: {each}=={metadata.version(each)}" for each in _PACKAGES]
    header = ["Metadata-Version: 2.1", "Name: palimpsest", f"Version: {version}", *requirements]
    content[f"{name}.dist-info/METADATA"] = "\n".join([*header, ""]).encode()
    content[f"{name}.dist-info/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: palimpsest\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = f"{name}.dist-info/RECORD"
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in content.items()]
    content[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in content.items():
            archive.writestr(zipfile.ZipInfo(member, _TIME), data, zipfile.ZIP_DEFLATED)
    return path


def _version() -> str:
    try:
        return metadata.version("palimpsest")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "0"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def announce(result: Any, arguments: list[str]) -> None:
    """Says where a job can be watched."""
    given = _options(arguments)
    print(
        f"Dataflow job {result.job_id()}: https://console.cloud.google.com/dataflow/jobs/"
        f"{given.region}/{result.job_id()}?project={given.project}",
        flush=True,
    )


def cancel(result: Any, arguments: list[str]) -> None:
    """Cancels the job, or says how the user can."""
    given = _options(arguments)
    try:
        result.cancel()
    except Exception:
        how = f"gcloud dataflow jobs cancel {result.job_id()} --region={given.region}"
        print(f"the job goes on, cancel it by: {how} --project={given.project}", flush=True)
    else:
        print(f"Dataflow job {result.job_id()} is being cancelled", flush=True)


def explain(error: BaseException, arguments: list[str]) -> UserError | None:
    """Returns what a failure of the job, or of its submission, means to the user, if we know."""
    text = " ".join(str(error).split())
    given = _options(arguments)
    cancelled = f"gcloud dataflow jobs cancel ID --region={given.region} --project={given.project}"
    if "already active job named" in text or "already an active job named" in text:
        return UserError(
            f"{text.split(' If you want')[0].rstrip('.')}: it builds this very cache; wait until "
            f"it has ended, or cancel it ({cancelled}), and give the same command again"
        )
    if "State: CANCELLED" in text:
        return UserError(f"the Dataflow job was cancelled: {_GO_ON}")
    if "State: FAILED" in text:
        reason = str(error).partition("Error:")[2].strip().splitlines()
        said = reason[-1] if reason and reason[-1] != "None" else "its page says why"
        return UserError(f"the Dataflow job failed: {said}; {_GO_ON}")
    if "did not reach to a terminal state" in text:
        return UserError(
            f"Dataflow did not answer for minutes; the job may go on. Once it has ended: {_GO_ON}"
        )
    if isinstance(error, OSError) and error.errno is None:  # of Beam's staging
        return UserError(text)
    return _refusal(error, text)


def _refusal(error: BaseException, text: str) -> UserError | None:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    if isinstance(error, exceptions.GoogleAPICallError | GoogleAuthError):
        return UserError(f"Google Cloud refuses: {text[:500]}; see docs/dataflow.md for the roles")
    return None
