"""A job by Beam.

Unlike Beam, it handles dying workers, user mistakes, noisy logs and a Ctrl-C ignored by the shell.
"""

import contextlib
import dataclasses
import itertools
import pickle
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.annexes.dataflow import flags, service
from pipeline.runners import failures
from pipeline.runners.engines import Bill
from tasks.reading.corpus import CorpusSpec
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.interruption import SERVICE_LIMIT_SECONDS

# Namespace of the job's counters in Dataflow.
_COUNTERS = "palimpsest"
# Elements per chunk, uncompressed bytes per chunk, and bytes of all chunks in a graph.
_CHUNK = 256
_CHUNK_BYTES = 16 << 20
_GRAPH_BYTES = 4 << 20


class _Counting:
    """Makes Beam's metrics of a call's counts."""

    def __init__(self, call: failures.Call):
        self._call = call

    def __call__(self, piece: Any) -> None:
        from apache_beam.metrics import Metrics

        for name, count in self._call(piece).items():
            Metrics.counter(_COUNTERS, name).inc(count)


# List prices of Dataflow batch workers in us-central1, dollars per hour. Source: Beam 2.77.0
# (September 2026), apache_beam/testing/load_tests/dataflow_cost_consts.py, from Google's price
# list. The default, n1-standard-1, has 3.75 GB of memory and 25 GB of disk per vCPU.
_DOLLARS_PER_VCPU, _DOLLARS_PER_GB, _DOLLARS_PER_DISK_GB = 0.056, 0.003557, 0.000054
_DOLLARS = _DOLLARS_PER_VCPU + 3.75 * _DOLLARS_PER_GB + 25 * _DOLLARS_PER_DISK_GB
# Covers unmeasured differences: vCPU speed, and the start and idle time of workers.
_ERROR = 0.5


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """Dataflow, as an engine (`engines.Engine`)."""

    arguments: tuple[str, ...]
    verbose: bool = False
    is_local = False
    bill = Bill("Dataflow", _DOLLARS, _ERROR)
    is_slow_to_ask = True
    not_of = staticmethod(flags.not_of)

    @classmethod
    def names(cls) -> list[str]:
        return []  # Beam has hundreds

    @classmethod
    def made(cls, given: Sequence[str], verbose: bool) -> "Dataflow":
        return cls((f"--runner={service.RUNNER}", *given), verbose)

    def check(self, corpus: CorpusSpec, folder: str) -> None:
        service.check(list(self.arguments), corpus, folder)

    def run(
        self, work: Callable[[Any], Mapping[str, int]], pieces: Sequence[Any], folder: str
    ) -> Counter[str]:
        return run(work, pieces, folder, list(self.arguments), self.verbose)


def run(
    function: Callable[[Any], Mapping[str, int]],
    elements: Sequence[Any],
    folder: str,
    arguments: list[str],
    verbose: bool,
    service: Any = service,
) -> Counter[str]:
    """Calls `function` on elements in a Beam job of a service; as `engines.Engine.run`."""
    beam = flags.import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    def explain(error: BaseException) -> UserError | None:
        return service.explain(error, arguments)

    with contextlib.ExitStack() as stack:
        arguments = stack.enter_context(service.prepared(arguments, folder))
        chunks = stack.enter_context(_sendable(_packed(elements), folder))
        interruption = stack.enter_context(failures.job(verbose, explain))
        interruption.seconds = SERVICE_LIMIT_SECONDS
        try:
            pipeline = beam.Pipeline(options=PipelineOptions(arguments))
        except ValueError as error:
            raise UserError(f"Beam refuses its flags: {error}") from error
        _ = (
            pipeline
            | "Pieces" >> beam.Create(chunks)
            | "Unpack" >> beam.FlatMap(_unpacked)
            | "Spread" >> beam.Reshuffle()
            | "Work" >> beam.Map(_Counting(failures.Call(function, folder)))
        )
        result = pipeline.run()
        _wait(result, service, arguments)
        counters = result.metrics().query()["counters"]
        ours = (each for each in counters if each.key.metric.namespace == _COUNTERS)
        return Counter(
            {each.key.metric.name: each.committed or each.attempted or 0 for each in ours}
        )


def _packed(elements: Sequence[Any], most: int = _CHUNK) -> list[bytes]:
    """Returns compressed chunks of at most `most` elements, fewer if large."""
    chunks = []
    for start in range(0, len(elements), most):
        data = pickle.dumps(elements[start : start + most])
        if len(data) > _CHUNK_BYTES and most > 1:
            chunks += _packed(elements[start : start + most], most // 2)
        else:
            chunks.append(zlib.compress(data))
    return chunks


def _unpacked(chunk: bytes | tuple[str, int, int]) -> Sequence[Any]:
    if isinstance(chunk, bytes):
        return pickle.loads(zlib.decompress(chunk))
    path, start, stop = chunk
    with files.open_read(path) as file:
        file.seek(start)
        return pickle.loads(zlib.decompress(file.read(stop - start)))


@contextlib.contextmanager
def _sendable(chunks: list[bytes], folder: str) -> Iterator[list[Any]]:
    """Yields the chunks or, if too large for a job's graph, (file in `folder`, begin, end) of each.

    Dataflow rejects graphs above 10 MB; a million files take 30 MB.
    """
    if sum(map(len, chunks)) <= _GRAPH_BYTES:
        yield chunks
        return
    path = files.join(folder, f"{files.PARTIAL}{uuid.uuid4().hex}-elements")
    ends = list(itertools.accumulate(map(len, chunks)))
    files.write_bytes(path, b"".join(chunks))
    try:
        yield [(path, *place) for place in itertools.pairwise([0, *ends])]
    finally:
        files.remove(path)


def _wait(result: Any, service: Any, arguments: list[str]) -> None:
    try:
        service.announce(result, arguments)
        result.wait_until_finish()
    except KeyboardInterrupt:
        service.cancel(result, arguments)
        raise
