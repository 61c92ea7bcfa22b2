"""Builds on Dataflow: the request, the staged files, and that these suffice to build."""

import base64
import bz2
import contextlib
import functools
import io
import json
import os
import pathlib
import pickle
import re
import signal
import sys
import threading
import time
import tomllib
import types
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest

from pipeline.annexes.dataflow import job as beam_job
from pipeline.annexes.dataflow import service as dataflow
from pipeline.building import graph
from pipeline.building.options import Options
from pipeline.building.planning import assign
from pipeline.runners import engines, failures
from pipeline.tokenizer import tokenize
from tasks import annexes
from tasks.cache.manifest import CacheManifest
from tasks.reading import sources
from tasks.reading.corpus import FilePart, SourceFile
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tests.support.plain_records import without_plan
from tests.support.processes import wait_for
from tests.support.servers import dataflow_worker
from tests.support.servers.dataflow import DataflowServer
from tests.support.servers.gcs import GcsServer

pytestmark = [pytest.mark.google, pytest.mark.processes]

ROOT = pathlib.Path(__file__).parents[4]
VERSION = metadata.version(extras.DISTRIBUTION)
TASK = "python_docs_span_corruption"
TOKEN = "hf_never_to_be_seen"
CORPUS = "--corpus=json:gs://bucket/corpus/documents.jsonl?validation=0.1"
FLAGS = (
    "--runner=DataflowRunner",
    "--project=our-project",
    "--region=europe-west4",
    "--temp_location=gs://bucket/temp",
)


@pytest.fixture
def gcs(corpus):
    """Returns a storage server that holds the corpus."""
    with GcsServer() as server:
        data = pathlib.Path(corpus.partition(":")[2].partition("?")[0]).read_bytes()
        server.store.put("bucket", "corpus/documents.jsonl", data, {}, {})
        yield server


@pytest.fixture
def submit(start, gcs):
    """Returns a function that starts a build of the corpus in `gcs` on a DataflowServer."""

    def process(server, *more, auth="--no_auth"):
        given = [*FLAGS, f"--dataflow_endpoint={server.url}", CORPUS, auth, *more]
        environment = gcs.environment() | {"HF_TOKEN": TOKEN}
        return start("gs://bucket/cache", *filter(None, given), **environment)

    return process


def test_request_and_staged_files(submit, gcs):
    with DataflowServer(lambda job: {}) as server:
        process = submit(
            server,
            "--sdk_container_image=europe-west4-docker.pkg.dev/our-project/images/pipeline:1",
            "--machine_type=n2-standard-4",
            "--num_workers=3",
            "--max_num_workers=20",
            "--autoscaling_algorithm=THROUGHPUT_BASED",
            "--service_account_email=workers@our-project.iam.gserviceaccount.com",
            "--experiments=shuffle_mode=service",
            "--labels=team=ours",
        )
        out, err = process.communicate(timeout=300)
    # A service that reports success without having done the work is not believed.
    assert process.returncode == 2
    assert "the job succeeded, but 16 of 16 shards are missing" in err, err
    (job,) = server.jobs
    assert f"Dataflow job {job.id}: https://console.cloud.google.com/dataflow/jobs/" in out
    assert job.request["name"] == dataflow.job_name(f"gs://bucket/cache/{TASK}")
    assert job.request["type"] in (1, "JOB_TYPE_BATCH")
    assert job.request["labels"] == {"team": "ours"}
    image = "europe-west4-docker.pkg.dev/our-project/images/pipeline:1"
    assert job.pool["workerHarnessContainerImage"] == image
    assert [each["containerImage"] for each in job.pool["sdkHarnessContainerImages"]] == [image]
    assert job.pool["machineType"] == "n2-standard-4"
    assert job.pool["numWorkers"] == 3
    scaling = job.pool["autoscalingSettings"]
    assert scaling["maxNumWorkers"] == 20
    assert scaling["algorithm"] in (2, "AUTOSCALING_ALGORITHM_BASIC")
    environment = job.request["environment"]
    assert environment["serviceAccountEmail"].startswith("workers@")
    assert {"use_runner_v2", "shuffle_mode=service"} <= set(environment["experiments"])
    assert environment["tempStoragePrefix"].startswith("storage.googleapis.com/bucket/temp/")
    assert job.options["project"] == "our-project"
    assert not job.options.get("save_main_session")

    staged = {each.url.rpartition("/")[2] for each in dataflow_worker.artifacts(job, gcs)}
    assert {"extra_packages.txt", f"palimpsest_lm-{VERSION}-py3-none-any.whl"} <= staged
    there = [name for name in gcs.names("temp/") if name.endswith(tuple(staged))]
    assert len(there) == len(staged)
    wheel = next(name for name in there if name.endswith(".whl"))
    check_wheel(gcs.read(wheel))
    proto = gcs.read(job.options["pipelineUrl"].removeprefix("gs://bucket/"))
    pickles = unpacked(proto)
    assert (
        sum(b"pipeline.building.graph" in pickle for pickle in pickles) >= 2
    )  # the function, and the pieces
    assert any(b"documents.jsonl" in pickle for pickle in pickles)
    for data in [json.dumps(job.request).encode(), *map(gcs.read, gcs.names()), *pickles]:
        assert TOKEN.encode() not in data
    assert not any(b"__main__" in pickle for pickle in pickles)


def unpacked(proto: bytes) -> list[bytes]:
    """Returns pickled and compressed data in a graph, including data nested in it."""
    found = []
    for text in re.findall(rb"[A-Za-z0-9+/]{40,}={0,2}", proto):
        for kind in (zlib, bz2):
            with contextlib.suppress(zlib.error, OSError, ValueError):
                found.append(kind.decompress(base64.b64decode(text)))
    for data in list(found):
        for start in re.finditer(b"x\x9c", data):  # zlib's header
            with contextlib.suppress(zlib.error):
                found.append(zlib.decompressobj().decompress(data[start.start() :]))
    return found


def check_wheel(data: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        for package in ("pipeline", "tasks", "vocab"):
            ours = {
                str(path.relative_to(ROOT))
                for suffix in ("py", "css", "js")
                for path in (ROOT / package).rglob(f"*.{suffix}")
            }
            assert ours <= names
            assert not [name for name in names if name.startswith("trainer")]
        assert (
            archive.read("pipeline/building/graph.py")
            == (ROOT / "pipeline/building/graph.py").read_bytes()
        )
        record = archive.read(f"palimpsest_lm-{VERSION}.dist-info/RECORD").decode().splitlines()
        assert {line.split(",")[0] for line in record} == names


def test_the_wheel_requires_the_packages_of_pyproject(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["pipeline"], *extras["gcp"]]
    names = {re.match(r"[\w-]+", each)[0] for each in wanted}
    assert set(dataflow._PACKAGES) == names - {"apache-beam"}
    (tmp_path / "again").mkdir()
    first, second = dataflow.wheel(tmp_path), dataflow.wheel(tmp_path / "again")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_the_staged_files_suffice(submit, start, gcs, cache, tmp_path):
    """A new process with an empty environment and only the staged files builds the same bytes."""
    with DataflowServer(lambda job: dataflow_worker.work(job, gcs, tmp_path)) as server:
        process = submit(server, auth="")
        out, err = process.communicate(timeout=900)
    (job,) = server.jobs
    assert process.returncode == 0, (err, job.messages)
    assert (job.counters["documents"], job.counters["encoded"]) == (2004, 2004)
    assert "tokenized 2,004 texts" in out
    local = start("gs://bucket/local", CORPUS, **gcs.environment())
    assert local.wait(300) == 0
    prefixes = (f"cache/{TASK}/", f"local/{TASK}/")
    there, here = ({n.removeprefix(p): gcs.read(n) for n in gcs.names(p)} for p in prefixes)
    assert there == here
    # The plan names the corpus; all else equals a local build of the same file.
    others = {path.name: path.read_bytes() for path in cache.iterdir()}
    for files in (there, others):
        (mark,) = [name for name in files if name.startswith(".plan-")]
        del files[mark]
    assert there.keys() == others.keys()
    for name in [name for name in there if ".receipt-" in name]:
        assert without_plan(there.pop(name)) == without_plan(others.pop(name))
    differing = {name for name, data in there.items() if others[name] != data}
    assert differing <= {"manifest.json", "plan.json"}
    bare = next(tmp_path.glob("bare/lib/*/site-packages"))
    assert not {"jax", "tensorflow", "trainer"} & set(os.listdir(bare))
    assert (bare / "pipeline/building/graph.py").read_bytes() == (
        ROOT / "pipeline/building/graph.py"
    ).read_bytes()


def refused(process) -> str:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    progress = ("building ", "gs://bucket/cache/")
    (line,) = [line for line in err.splitlines() if not line.startswith(progress)]
    return line


@pytest.mark.slow
def test_how_jobs_end(submit, gcs):
    failure = failures.WorkerFailure.of(message="gs://bucket/corpus/documents.jsonl has changed")

    def fails(job):
        raise RuntimeError(f"Traceback (most recent call last):\n…\n{failure} [while running …]")

    with DataflowServer(fails) as server:
        assert "documents.jsonl has changed" in refused(submit(server))

    def dies(job):
        raise RuntimeError("The job failed because a work item has failed 4 times.")

    with DataflowServer(dies) as server:
        line = refused(submit(server))
        assert "a work item has failed 4 times" in line
        assert "run the same command again" in line
    with DataflowServer(lambda job: {}, refuses=(403, "dataflow.jobs.create denied")) as server:
        assert "Google Cloud refused" in refused(submit(server))


@pytest.mark.slow
def test_interrupted_and_submitted_twice(submit):
    over = threading.Event()
    with DataflowServer(lambda job: over.wait(600) and {}) as server:
        first = submit(server)
        assert wait_for(lambda: server.jobs, first)
        assert "another build is writing gs://bucket/cache/" in refused(submit(server))
        first.kill()
        first.communicate()
        line = refused(submit(server))
        assert "There is already active job named palimpsest-python-docs-span-corruption-" in line
        assert "gcloud dataflow jobs cancel" in line
        assert len(server.jobs) == 1
        server.jobs[0].state = "JOB_STATE_CANCELLED"  # by this command
        second = submit(server)
        assert any("Dataflow job" in line for line in second.stdout)  # announced
        second.send_signal(signal.SIGINT)
        out, err = second.communicate(timeout=120)
        assert second.returncode == 130, err
        assert "run the same command to resume" in err
        assert "is being cancelled" in out
        assert server.jobs[1].state == "JOB_STATE_CANCELLED"

        third = submit(server)
        assert wait_for(lambda: len(server.jobs) > 2, third)
        server.jobs[2].state = "JOB_STATE_CANCELLED"  # by another user
        assert "the Dataflow job was cancelled: finished shards are kept" in refused(third)
        over.set()


def checked(*flags: str, corpus="parquet:gs://bucket/*", cache_dir="gs://bucket/cache") -> None:
    given = {flag.split("=")[0]: flag for flag in [*FLAGS, *flags]}
    arguments = [flag for flag in given.values() if not flag.endswith("=")]
    dataflow.check(arguments, sources.parse(corpus), cache_dir)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--project="], "also needs --project=…"),
        (["--region=", "--temp_location="], "also needs --region=… --temp_location=…"),
        (["--temp_location=/tmp/x"], "--temp_location=/tmp/x is not in Cloud Storage"),
        (["--staging_location=stage"], "--staging_location=stage is not in Cloud Storage"),
        (["--staging_location=gs://"], "is not in Cloud Storage"),
        (["--update"], "--update is for streaming jobs"),
        (["--template_location=gs://bucket/t"], "--template_location is not supported"),
        (["--job_name=Ours"], "--job_name=Ours: use lower-case letters"),
    ],
)
def test_unusable_flags(flags, message):
    with pytest.raises(UserError, match=re.escape(message)):
        checked("--no_auth", *flags)


def test_folders_that_workers_cannot_access():
    with pytest.raises(UserError, match="is a local folder"):
        checked("--no_auth", cache_dir="cache")
    for corpus in ("parquet:/data/*.parquet", "text:file:///data/x"):
        with pytest.raises(UserError, match="workers cannot read it: copy it first"):
            checked("--no_auth", corpus=corpus)
    for corpus in ("hf:owner/name", "python_docs", "json:gs://bucket/x.jsonl"):
        checked("--no_auth", corpus=corpus)


def test_no_credentials(monkeypatch):
    import google.auth
    from google.auth import exceptions

    def default(scopes):
        raise exceptions.DefaultCredentialsError("Your default credentials were not found.")

    monkeypatch.setattr(google.auth, "default", default)
    with pytest.raises(UserError, match="gcloud auth application-default login"):
        checked()


def test_beam_without_its_google_cloud_packages(monkeypatch):
    import google.cloud

    monkeypatch.delattr(google.cloud, "dataflow", raising=False)
    monkeypatch.setitem(sys.modules, "google.cloud.dataflow", None)
    with pytest.raises(UserError, match=r"pip install .*\[gcp\]'"):
        checked()


BEAM_HERE = "--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner"
# In place of the service.
HERE = types.SimpleNamespace(
    prepared=lambda arguments, folder: contextlib.nullcontext(arguments),
    explain=lambda error, arguments: None,
    announce=lambda result, arguments: None,
)


def test_flags_that_beam_rejects(tmp_path):
    flags = [BEAM_HERE, "--environment_type=PROCESS"]
    with pytest.raises(UserError, match=r"Beam refuses its flags.*\n?.*process_command"):
        beam_job.run(dict, [1], str(tmp_path), flags, False, HERE)


def test_job_names():
    name = dataflow.job_name("gs://bucket/caches/rlm_span_corruption")
    assert re.fullmatch("palimpsest-rlm-span-corruption-[0-9a-f]{8}", name)
    assert name != dataflow.job_name("gs://bucket/other/rlm_span_corruption")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", dataflow.job_name(f"gs://b/{'Ab_' * 40}"))
    assert len(dataflow.job_name(f"gs://b/{'Ab_' * 40}")) <= 63


def test_a_million_files_are_no_part_of_the_graph(tmp_path, monkeypatch):
    files = [
        SourceFile("gs://bucket/", f"{n:06}.jsonl", "train", 1000, {"etag": f"{n:032x}"})
        for n in range(4000)
    ]
    parts = [FilePart(file, 0, 1000, 1000) for file in files]
    pieces = [
        sources.Piece(str(n), ("train",), 1000, True, "json", tuple(parts[n::40]))
        for n in range(40)
    ]
    monkeypatch.setattr(beam_job, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(beam_job, "_GRAPH_BYTES", 1000)
    packed = beam_job._packed(pieces)
    assert len(packed) > 10
    with beam_job._sendable(packed, str(tmp_path)) as chunks:
        assert len(list(tmp_path.iterdir())) == 1
        assert len(pickle.dumps(chunks)) < 10_000
        assert [piece for chunk in chunks for piece in beam_job._unpacked(chunk)] == pieces
    counts = beam_job.run(_files_of, pieces, str(tmp_path), [BEAM_HERE], False, HERE)
    assert counts["files"] == 4000
    assert not list(tmp_path.iterdir())


def _files_of(piece):
    return {"files": len(piece.parts)}


def test_threads_of_a_worker_share_no_buffers(cache, checksums, tmp_path, corpus, monkeypatch):
    """Dataflow calls the function from several threads of a process."""
    usual = tokenize.without_special

    def late(*arguments):
        time.sleep(0.02)  # other threads run before these tokens are written
        return usual(*arguments)

    monkeypatch.setattr(tokenize, "without_special", late)
    plan = CacheManifest.load(str(cache)).plan
    found = sources.resolve(sources.parse(corpus))
    (tmp_path / "sentencepiece.model").write_bytes((cache / "sentencepiece.model").read_bytes())
    job = graph.Job(str(tmp_path), plan, found)
    assignments = assign(found.pieces)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(functools.partial(graph.build_piece, job), assignments))
    expected = checksums(cache)
    assert all(expected[name] == sha256 for name, sha256 in checksums(tmp_path).items())


@pytest.mark.skipif(not annexes.entries("dry_runs"), reason="no dry runs")
def test_the_bill_of_a_dry_run(build, tmp_path, capsys):
    flags = ["--dry_run", "--runner=DataflowRunner", "--project=none", "--region=us-central1"]
    build(tmp_path, *flags)
    listed = capsys.readouterr().out
    assert re.search(r"on Dataflow: [\d.]+ vCPU-hours, \$[\d.]+, both ± 50%", listed)
    flags[1] = "--runner=dataflow"  # Beam reads it, too
    build(tmp_path, *flags, "--price_per_vcpu_hour=1e9")
    charged = capsys.readouterr().out
    build(tmp_path, *flags, "--price_per_vcpu_hour=0")
    assert "vCPU-hours, $0.00," in capsys.readouterr().out
    hours, dollars = re.search(r"Dataflow: ([\d.]+) vCPU-hours, \$([\d.,]+),", charged).groups()
    assert float(dollars.replace(",", "")) > 100
    assert float(dollars.replace(",", "")) == pytest.approx(float(hours) * 1e9, abs=6e6)


def test_its_name_and_flags(build, tmp_path):
    for runner in ("DataflowRunner", "dataflow"):
        options = Options("t", "v", "c", runner=runner, runner_flags=("--project=p",))
        assert engines.chosen(options).arguments == ("--runner=DataflowRunner", "--project=p")
    with pytest.raises(UserError, match="only --runner=DataflowRunner reads --num_workers"):
        build(tmp_path, "--num_workers=2")
