"""A local server of Google Cloud Dataflow's API for Beam's real client.

It serves the part of the REST API in which the client submits a job, polls its state, reads its
messages and metrics, and cancels it. The test defines what a job does: `work` is called with the
job in a thread and returns its counters, or raises. In tests:

    with DataflowServer(work) as dataflow:
        main([… "--runner=DataflowRunner", f"--dataflow_endpoint={dataflow.url}"])
    (job,) = dataflow.jobs
"""

import dataclasses
import gzip
import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from tests.support.servers.quiet import QuietHandler, QuietServer

_ENDED = ("JOB_STATE_DONE", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED")
_TIME = "2026-01-01T00:00:00Z"


@dataclasses.dataclass
class Job:
    """A job: the request that submitted it, and its state."""

    id: str
    request: dict[str, Any]
    state: str = "JOB_STATE_RUNNING"
    counters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    messages: list[str] = dataclasses.field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        return self.request["environment"]["sdkPipelineOptions"]["options"]

    @property
    def pool(self) -> dict[str, Any]:
        """The only worker pool."""
        (pool,) = self.request["environment"]["workerPools"]
        return pool

    def as_json(self) -> dict[str, Any]:
        return self.request | {
            "id": self.id, "currentState": self.state, "currentStateTime": _TIME
        }  # fmt: skip


class DataflowServer(QuietServer):
    """A server of Dataflow, running inside a `with` block; `url` is its address.

    Args:
      work: does a job's work and returns its counters; an exception fails the job.
      refuses: an HTTP status and a message with which every submission is rejected.
    """

    def __init__(
        self, work: Callable[[Job], Mapping[str, int]], refuses: tuple[int, str] | None = None
    ):
        self.work, self.refuses = work, refuses
        self.jobs: list[Job] = []

    def __enter__(self) -> Self:
        super().__enter__()
        # By this name, since Beam's client looks for "localhost" in the address.
        self.url = self.url.replace("127.0.0.1", "localhost")
        return self

    def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Starts a job, or returns the running one with the same name, as Dataflow does."""
        for job in self.jobs:
            if job.request["name"] == request["name"] and job.state not in _ENDED:
                return job.as_json()
        job = Job(f"2026-01-01_00_00_00-{len(self.jobs) + 1}", request)
        self.jobs.append(job)
        answer = job.as_json()
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        return answer

    def _run(self, job: Job) -> None:
        try:
            job.counters = self.work(job)
        except Exception as error:
            job.messages.append(str(error))
            end = "JOB_STATE_FAILED"
        else:
            end = "JOB_STATE_DONE"
        if job.state not in _ENDED:
            job.state = end


class _Handler(QuietHandler):
    owner: DataflowServer

    def do_POST(self) -> None:
        if self.owner.refuses:
            status, message = self.owner.refuses
            self.answer(status, {"error": {"code": status, "message": message}})
        elif re.search(r"/projects/[^/]+/locations/[^/]+/jobs\?", self.path):
            self.answer(200, self.owner.submit(self._asked()))
        else:
            self.answer(404, {})

    def do_PUT(self) -> None:
        job = self._job()
        if job and self._asked().get("requestedState") in ("JOB_STATE_CANCELLED", 5):
            job.state = "JOB_STATE_CANCELLED"
        self.answer(200 if job else 404, job.as_json() if job else {})

    def do_GET(self) -> None:
        job = self._job()
        if not job:
            self.answer(404, {"error": {"code": 404, "message": "no such job"}})
        elif "/messages" in self.path:
            kind = {"time": _TIME, "messageImportance": "JOB_MESSAGE_ERROR"}
            found = [{"id": str(n), "messageText": text, **kind}
                     for n, text in enumerate(job.messages)]  # fmt: skip
            self.answer(200, {"jobMessages": found})
        elif "/metrics" in self.path:
            context = {"namespace": "palimpsest", "step": "Work"}
            found = [
                {"name": {"origin": "user", "name": name, "context": each}, "scalar": value}
                for name, value in job.counters.items()
                for each in (context, {**context, "tentative": "true"})
            ]
            self.answer(200, {"metrics": found})
        else:
            self.answer(200, job.as_json())

    def _job(self) -> Job | None:
        found = re.search(r"/jobs/([^/?]+)", self.path)
        return next((job for job in self.owner.jobs if found and job.id == found[1]), None)

    def _asked(self) -> dict[str, Any]:
        data = self.body()
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        return json.loads(data)


DataflowServer.handler = _Handler
