"""A job on Apache Spark: on a standalone cluster, YARN, Kubernetes or one machine, by pyspark.

A piece is a task. Spark repeats lost tasks, may run slow ones twice, and counts one result of each.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.runners import failures
from pipeline.runners.engines import FlagsOfFields
from tasks.reading.corpus import CorpusSpec
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rule, field
from tasks.terminal.interruption import SERVICE_LIMIT_SECONDS

_JAVA = "Spark needs Java 17 or later: apt-get install openjdk-17-jre-headless, or set JAVA_HOME"
_PATIENCE_SECONDS = 60
_SETTINGS = Rule("KEY=VALUE", lambda given: all("=" in each for each in given))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spark(FlagsOfFields):
    """Spark, as an engine (`engines.Engine`)."""

    master: str | None = field(
        None, "spark://HOST:PORT, yarn, k8s://URL or local[N]; by default as Spark's files say"
    )
    conf: tuple[str, ...] = field(
        (), "setting of Spark, KEY=VALUE; may be repeated", rule=_SETTINGS, repeated=True
    )
    verbose: bool = False
    is_local = False
    bill = None

    def check(self, corpus: CorpusSpec, folder: str) -> None:
        with extras.needed("--runner=spark", "spark"):
            import pyspark  # noqa: F401
        home = os.environ.get("JAVA_HOME")
        if not shutil.which(os.path.join(home, "bin", "java") if home else "java"):
            raise UserError(
                f"there is no Java in {f'JAVA_HOME={home}' if home else 'PATH'}: {_JAVA}"
            )
        kind, _, masters = (self.master or "").partition("://")
        if kind == "spark" and (reason := failures.unreachable(masters.split(","))):
            raise UserError(f"no Spark master answers at --master=spark://{reason}")

    def run(
        self, work: Callable[[Any], Mapping[str, int]], pieces: Sequence[Any], folder: str
    ) -> Counter[str]:
        with (
            failures.job(self.verbose, _explained) as interruption,
            self._context(folder) as context,
        ):
            interruption.seconds = SERVICE_LIMIT_SECONDS
            mapped = context.parallelize(pieces, len(pieces)).map(failures.Call(work, folder))
            return sum(map(Counter, mapped.collect()), Counter())

    @contextlib.contextmanager
    def _context(self, folder: str) -> Iterator[Any]:
        """Yields the connection to the cluster, after printing the address of the job's page."""
        from pyspark import SparkConf, SparkContext

        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # a path on every worker
        conf = SparkConf().setAppName(f"palimpsest {folder}")
        if self.master:
            conf.setMaster(self.master)
        for each in ("spark.ui.showConsoleProgress=false", *self.conf):
            conf.set(*each.split("=", 1))
        usual = signal.getsignal(signal.SIGINT)
        context = SparkContext(conf=conf)
        if signal.getsignal(signal.SIGINT) is not usual:  # pyspark's hides Ctrl-C from ours
            signal.signal(signal.SIGINT, usual)
        timer = threading.Timer(_PATIENCE_SECONDS, _look, [context])
        timer.daemon = True
        timer.start()
        try:
            print(f"Spark application {context.applicationId}: {context.uiWebUrl}", flush=True)
            context.setJobDescription(f"pieces of {folder}")
            yield context
        finally:
            timer.cancel()
            context.stop()


def _look(context: Any) -> None:
    with contextlib.suppress(Exception):  # the job may have ended
        if context._jsc.sc().getExecutorMemoryStatus().size() < 2:  # the driver is one
            print(
                f"no worker of {context.master} has joined for {_PATIENCE_SECONDS} s: there is "
                "none, or all are busy or too small; this job waits for one",
                flush=True,
            )


def _explained(error: BaseException) -> UserError | None:
    """Returns a UserError for a failure of the cluster or of a worker's Python."""
    text = str(error)
    if "JAVA_GATEWAY_EXITED" in text:
        return UserError(f"Java does not start: {_JAVA}")
    if found := re.search(r"PYTHON_VERSION_MISMATCH\] (.*?\.)(\s|$)", text):
        return UserError(f"{found[1]} Set PYSPARK_PYTHON to the workers' path of the same Python")
    python = "PYSPARK_PYTHON names the path of its Python"
    if explained := failures.of_environment(text, python):
        return explained
    if found := re.search(r'Cannot run program "(.*?)"', text):
        return UserError(f"a worker has no {found[1]}: {python}")
    if not type(error).__module__.startswith("py4j") or "PYTHON_EXCEPTION" in text:
        return None
    reasons = [line.strip(" :") for line in text.splitlines()[1:] if line.strip(" :")] or [text]
    return UserError(f"Spark stopped the job ({reasons[0][:400]}); {failures.RESUME}")
