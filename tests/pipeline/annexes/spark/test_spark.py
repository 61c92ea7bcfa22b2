"""The engine Spark: its flags, and its errors in one line."""

import dataclasses
import re
import socket
import sys
import types

import pytest

from pipeline.annexes.spark import engine
from pipeline.building.options import Options
from pipeline.runners import engines, failures
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tests.support.clusters import nobody as nobody
from tests.support.clusters import refused

CORPUS = sources.parse("text:/corpus/*.txt")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--runner=spark", "--workers=2"], "the cluster of --runner=spark has its own workers"),
        (["--runner=spark", "--conf=a"], "--conf=a: it must be KEY=VALUE"),
        (["--conf", "a=b"], "only --runner=spark reads --conf"),
        (["--master=local"], "only --runner=spark reads --master"),
    ],
)
def test_flags_that_do_not_go_together(build, tmp_path, given, says):
    assert says in refused(build, tmp_path, *given)


def test_its_flags():
    spark = Options("t", "v", "c", runner="Spark", verbose=True)
    given = ("--master", "local[2]", "--conf=a=b=c", "--conf=d=e")
    made = engines.chosen(dataclasses.replace(spark, runner_flags=given))
    assert made == engine.Spark(master="local[2]", conf=("a=b=c", "d=e"), verbose=True)


def test_the_package_is_missing(build, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    said = refused(build, tmp_path, "--runner=spark")
    assert said.startswith("--runner=spark needs the package pyspark")
    assert "[spark]" in said


def test_a_cluster_that_does_not_answer(monkeypatch, nobody):
    monkeypatch.setitem(sys.modules, "pyspark", types.ModuleType("pyspark"))
    monkeypatch.setattr(engine.shutil, "which", lambda command: command)
    with pytest.raises(UserError, match=f"no Spark master answers at --master=spark://{nobody}"):
        engine.Spark(master=f"spark://{nobody}").check(CORPUS, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = f"127.0.0.1:{server.getsockname()[1]}"
        engine.Spark(master=f"spark://{nobody},{other}").check(CORPUS, "")  # a standby master
    engine.Spark(master="yarn").check(CORPUS, "")
    monkeypatch.setattr(engine.shutil, "which", lambda command: None)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(UserError, match="there is no Java in JAVA_HOME=/nowhere: Spark needs Java"):
        engine.Spark().check(CORPUS, "")
    monkeypatch.delenv("JAVA_HOME")
    with pytest.raises(UserError, match="there is no Java in PATH: "):
        engine.Spark().check(CORPUS, "")


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
    with pytest.raises(UserError, match=re.escape(says)), failures.job(True, engine._explained):
        raise Py4JJavaError(text)


def test_bugs_keep_their_tracebacks():
    for error in (Py4JJavaError("[PYTHON_EXCEPTION] ValueError: a bug"), ValueError("a bug")):
        with pytest.raises(type(error), match="a bug"), failures.job(True, engine._explained):
            raise error
