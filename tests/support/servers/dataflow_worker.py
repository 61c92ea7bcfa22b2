"""Runs a job's staged pipeline as Dataflow's workers do, in an environment of its own.

`work(job, …)` makes a virtual environment with the packages of a worker's image and none of ours,
installs the staged files into it as Beam's containers do, and runs this file there:

    BARE/bin/python -I dataflow_worker.py gs://…/pipeline.pb

This reads the job's graph, runs it and prints its counters as JSON.
"""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import venv
from importlib import metadata
from typing import Any


def run(url: str) -> dict[str, int]:
    """Runs the staged pipeline at `url` in this process; returns the sums of its counters."""
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.portability import python_urns
    from apache_beam.portability.api import beam_runner_api_pb2
    from apache_beam.runners.portability.fn_api_runner import fn_runner

    assert "pipeline" not in sys.modules
    proto = beam_runner_api_pb2.Pipeline.FromString(FileSystems.open(url).read())
    for environment in proto.components.environments.values():
        environment.urn, environment.payload = python_urns.EMBEDDED_PYTHON, b""
        del environment.dependencies[:]
    result = fn_runner.FnApiRunner().run_via_runner_api(proto, PipelineOptions([]))
    result.wait_until_finish()
    counters = result.metrics().query()["counters"]
    ours = [each for each in counters if each.key.metric.namespace == "palimpsest"]
    return {each.key.metric.name: each.committed for each in ours}


def bare(folder: pathlib.Path) -> pathlib.Path:
    """Makes a virtual environment with the dependencies of palimpsest-lm[pipeline,gcp].

    Returns its Python.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (target,) = folder.glob("lib/python*/site-packages")
    for name in sorted(_closure("pip", *_required("pipeline", "gcp"))):
        found = metadata.distribution(name)
        for top in {path.parts[0] for path in found.files or [] if path.parts[0] != ".."}:
            source, link = pathlib.Path(str(found.locate_file(top))), target / top
            if source.exists() and not link.exists() and top != "__pycache__":
                link.symlink_to(source)
    return python


def _required(*extras: str) -> list[str]:
    import tomllib

    path = pathlib.Path(__file__).parents[3] / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][e] for e in extras)]
    return [each for wanted in lists for each in wanted]


def _closure(*requirements: str) -> set[str]:
    """Returns the names of all distributions that the requirements need, extras included."""
    from packaging.requirements import Requirement

    waiting = [(Requirement(each), "") for each in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = re.sub("[-_.]+", "-", requirement.name).lower()
        for each in ("", *requirement.extras):
            if (name, each) in seen:
                continue
            seen.add((name, each))
            waiting += [(Requirement(r), each) for r in metadata.requires(name) or []]
    return {name for name, _ in seen}


def work(job: Any, gcs: Any, folder: pathlib.Path, **environment: str) -> dict[str, int]:
    """Does the work of a job of dataflow.py, using only the files that it staged in `gcs`.

    Source: `sdks/python/container/piputil.go` of Apache Beam, for what is installed and how.
    """
    python, staged = bare(folder / "bare"), folder / "staged"
    staged.mkdir()
    for artifact in artifacts(job, gcs):
        data = gcs.read(artifact.url.removeprefix("gs://bucket/"))
        assert hashlib.sha256(data).hexdigest() == artifact.sha256
        (staged / artifact.url.rpartition("/")[2]).write_bytes(data)
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), **gcs.environment(), **environment}
    for package in (staged / "extra_packages.txt").read_text().split():
        for flags in (["--upgrade", "--force-reinstall", "--no-deps"], []):
            command = [python, "-m", "pip", "install", "--no-index", *flags, staged / package]
            _checked(command, given, folder)
    out = _checked([python, "-I", __file__, job.options["pipelineUrl"]], given, folder)
    return json.loads(out.splitlines()[-1])


def artifacts(job: Any, gcs: Any) -> list[Any]:
    from apache_beam.portability.api import beam_runner_api_pb2

    data = gcs.read(job.options["pipelineUrl"].removeprefix("gs://bucket/"))
    proto = beam_runner_api_pb2.Pipeline.FromString(data)
    (environment,) = proto.components.environments.values()
    return [
        beam_runner_api_pb2.ArtifactUrlPayload.FromString(each.type_payload)
        for each in environment.dependencies
    ]


def _checked(command: list[Any], environment: dict[str, str], folder: pathlib.Path) -> str:
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
