"""Engines by name, their flags, and their errors in one line."""

import errno
import os
import re
import socket
import sys
import types

import pytest

from pipeline.building.options import Options
from pipeline.runners import beam_job, engines, failures, ray_job, spark_job
from tasks.reading import sources
from tasks.terminal.command_line import UserError

CORPUS = sources.parse("text:/corpus/*.txt")


def chosen(build, tmp_path, *flags):
    with pytest.raises(UserError) as error:
        build(tmp_path, *flags)
    assert not list(tmp_path.iterdir())
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--runner=spark", "--workers=2"], "the cluster of --runner=spark has its own workers"),
        (
            ["--runner=spark", "--num_workers=2"],
            "--num_workers=2 has no effect with --runner=spark",
        ),
        (["--runner=spark", "--conf=a"], "--conf=a: it must be KEY=VALUE"),
        (["--runner=ray", "--adress=a:1"], "unknown flag --adress (did you mean --address?)"),
        (["--address=auto"], "only --runner=ray reads --address"),
        (["--runner=Ray", "--conf", "a=b"], "only --runner=spark reads --master and --conf"),
        (["--master=local"], "only --runner=spark reads --master and --conf"),
        (["--part=1/2", "--runner=ray"], "--runner=ray spreads all pieces by itself"),
    ],
)
def test_flags_that_do_not_go_together(build, tmp_path, given, says):
    assert says in chosen(build, tmp_path, *given)


def test_engines_by_name():
    def made(runner, *given):
        return engines.chosen(
            Options("t", "v", "c", runner=runner, runner_flags=given, verbose=True)
        )

    spark = made("Spark", "--master", "local[2]", "--conf=a=b=c", "--conf=d=e")
    assert spark == spark_job.Spark(master="local[2]", conf=("a=b=c", "d=e"), verbose=True)
    assert made("ray") == ray_job.Ray(verbose=True)
    assert made("SparkRunner") == beam_job.Beam(("--runner=SparkRunner",), True)
    assert made("FnApiRunner").is_local
    assert made("dataflow").bills == "Dataflow"


@pytest.mark.parametrize(("engine", "package"), [("spark", "pyspark"), ("ray", "ray")])
def test_a_package_that_is_missing(build, tmp_path, monkeypatch, engine, package):
    monkeypatch.setitem(sys.modules, package, None)
    said = chosen(build, tmp_path, f"--runner={engine}")
    assert said.startswith(f"--runner={engine} needs the package {package}")
    assert f"[{engine}]" in said


@pytest.fixture
def nobody():
    """The address of a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def test_clusters_that_do_not_answer(monkeypatch, tmp_path, nobody):
    for package in ("pyspark", "ray"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setattr(spark_job.shutil, "which", lambda command: command)
    with pytest.raises(UserError, match=f"no Spark master answers at --master=spark://{nobody}"):
        spark_job.Spark(master=f"spark://{nobody}").check(CORPUS, "")
    for address in (nobody, f"ray://{nobody}"):
        with pytest.raises(UserError, match=f"no Ray cluster answers at --address={nobody}"):
            ray_job.Ray(address=address).check(CORPUS, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = f"127.0.0.1:{server.getsockname()[1]}"
        spark_job.Spark(master=f"spark://{nobody},{other}").check(CORPUS, "")  # a standby master
    spark_job.Spark(master="yarn").check(CORPUS, "")
    monkeypatch.setattr(spark_job.shutil, "which", lambda command: None)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(UserError, match="there is no Java in JAVA_HOME=/nowhere: Spark needs Java"):
        spark_job.Spark().check(CORPUS, "")
    monkeypatch.delenv("JAVA_HOME")
    with pytest.raises(UserError, match="there is no Java in PATH: "):
        spark_job.Spark().check(CORPUS, "")


class Py4JJavaError(Exception):
    __module__ = "py4j.protocol"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[JAVA_GATEWAY_EXITED] Java gateway process exited", "Java does not start: Spark needs"),
        (
            "An error\n: x: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 "
            "than that in driver: 3.11, PySpark cannot run.\n more",
            "version: 3.10 than that in driver: 3.11, PySpark cannot run. Set PYSPARK_PYTHON",
        ),
        (
            "…\nModuleNotFoundError: No module named 'pipeline'\n…",
            "a worker cannot import pipeline: install Palimpsest there as here; PYSPARK_PYTHON",
        ),
        (
            'java.io.IOException: Cannot run program "/venv/bin/python": error=2, No such file',
            "a worker has no /venv/bin/python: PYSPARK_PYTHON",
        ),
        (
            "An error occurred while calling z:…\n: org.apache.spark.SparkException: Job aborted "
            "due to stage failure: ExecutorLostFailure\n\tat x",
            "Spark stopped the job (org.apache.spark.SparkException: Job aborted due to stage "
            "failure: ExecutorLostFailure); finished work is kept; run the same command to resume",
        ),
    ],
)
def test_failures_of_spark(text, says):
    with pytest.raises(UserError, match=re.escape(says)), failures.job(True, spark_job._explained):
        raise Py4JJavaError(text)


def test_bugs_keep_their_tracebacks():
    for error in (Py4JJavaError("[PYTHON_EXCEPTION] ValueError: a bug"), ValueError("a bug")):
        with (
            pytest.raises(type(error), match="a bug"),
            failures.job(True, spark_job._explained),
        ):
            raise error


def test_errors_of_workers(tmp_path, monkeypatch):
    def full(piece):
        raise OSError(errno.ENOSPC, "No space left on device")

    def mistaken(piece):
        raise UserError('"it" is\nwrong')

    def run(work):
        with failures.job(True, lambda error: None):
            try:
                failures.Call(work, "/caches/task")(1)
            except failures.WorkerFailure as error:
                raise RuntimeError(f"of an engine: {error}\n\tat java") from None

    with pytest.raises(OSError, match="No space left") as error:
        run(full)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, "/caches/task")
    with pytest.raises(UserError, match='"it" is\nwrong'):
        run(mistaken)
    # A worker's relative paths mean what they mean here.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    call = failures.Call(lambda piece: {os.getcwd(): 1}, "")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call(1) == {str(tmp_path): 1}
