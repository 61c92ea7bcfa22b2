"""Measures the way of `trainer.pretrain` to its first update, by part, in a fresh home folder.

    python -m benchmarks.startup --task=TASK --cache_dir=DIR --preset=t5_1_1_mini \\
        --train_steps=10 [--field.path=value] [--runs=2] [--programs=10]

The first run finds no compiled program, the second those of the first. All runs have folders of
their own for compiled programs, both JAX's and numba's. Further flags are `trainer.pretrain`'s.

Each row is a part of the time from the start of the process to the end of its first update, in
seconds of the wall clock and of all cores together; the latter hardly change with other work on
the machine. A moment counts as the innermost part: an import during tracing is an import. "rest"
is the work of the programs themselves, and what lies between the parts. The last row is the whole
command. `--programs` lists the programs that took longest to compile or to read.
"""

import argparse
import builtins
import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# JAX's event -> part.
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
_IMPORTS, _NUMBA, _DATA = "imports", "numba", "opening the data"
_PARTS = (_IMPORTS, _DATA, _NUMBA, *_EVENTS.values(), "rest")
# Folder of a child's results; its process is one that measures itself.
_RESULTS = "PALIMPSEST_STARTUP_RESULTS"
_SAMPLE_SECONDS = 0.005


class _Span(NamedTuple):
    part: str
    name: str
    begin: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=2, help="runs in one home (default: 2)")
    parser.add_argument("--programs", type=int, default=10, help="programs to list (default: 10)")
    own, flags = parser.parse_known_args()
    # The parent prints which machine it is; the child must not import what that needs.
    from benchmarks.machine import machine

    print(machine())
    with tempfile.TemporaryDirectory() as home:
        for number in range(own.runs):
            found = _measured(pathlib.Path(home), number, flags)
            print(f"\nrun {number + 1}: {found['compiled']} programs compiled or read")
            print(_table(found))
            for seconds, name in found["programs"][: own.programs]:
                print(f"  {seconds:7.2f} s  {name}")


def _measured(home: pathlib.Path, number: int, flags: list[str]) -> dict[str, Any]:
    """Returns the parts of a run in a process of its own."""
    results = home / f"results_{number}.json"
    own = {"JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {
        "HOME": str(home),
        "NUMBA_CACHE_DIR": str(home / "numba"),
        _RESULTS: f"{time.monotonic()}:{results}",
    }
    words = [sys.executable, "-m", "benchmarks.startup", f"--model_dir={home / f'm{number}'}"]
    done = subprocess.run([*words, *flags], env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(results.read_text())


def _table(found: dict[str, Any]) -> str:
    lines = [f"  {'part':18}{'wall s':>8}{'cpu s':>8}"]
    for name in (*_PARTS, "first update", "whole command"):
        lines.append(f"  {name:18}{found[name][0]:8.2f}{found[name][1]:8.2f}")
    return "\n".join(lines)


def _child() -> None:
    began, _, path = os.environ[_RESULTS].partition(":")
    watch = _Watch(float(began))
    _time_imports(watch)
    _time_data(watch)
    _time_numba(watch)
    _time_programs(watch)
    _note_first_update(watch)
    from trainer.pretrain import main as pretrain

    code = pretrain(sys.argv[1:])
    pathlib.Path(path).write_text(json.dumps(watch.summary()))
    sys.exit(code)


class _Watch:
    """The spans of a process, and samples of its processor time."""

    def __init__(self, began: float):
        self.began, self.spans, self.updated = began, [], 0.0
        self._samples = [(began, 0.0)]
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self._samples.append((time.monotonic(), time.process_time()))
            time.sleep(_SAMPLE_SECONDS)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with its calls as spans."""

        def call(*given: Any, **named: Any) -> Any:
            begin = time.monotonic()
            try:
                return function(*given, **named)
            finally:
                self.spans.append(_Span(part, "", begin, time.monotonic()))

        return call

    def summary(self) -> dict[str, Any]:
        import numpy as np

        now = time.monotonic()
        walls, processor = np.array([*self._samples, (now, time.process_time())]).T
        parts: dict[str, list[float]] = {part: [0.0, 0.0] for part in _PARTS}
        for part, begin, end in _innermost(self.spans, self.began, self.updated):
            parts[part][0] += end - begin
            parts[part][1] += float(np.diff(np.interp([begin, end], walls, processor))[0])
        programs = [span for span in self.spans if span.part == "compiling"]
        return {
            **parts,
            "first update": [sum(each[i] for each in parts.values()) for i in (0, 1)],
            "whole command": [now - self.began, time.process_time()],
            "compiled": len(programs),
            "programs": sorted(
                [(program.end - program.begin, program.name) for program in programs]
            )[::-1],
        }


def _innermost(
    spans: Iterable[_Span], begin: float, end: float
) -> Iterable[tuple[str, float, float]]:
    """Yields (part, begin, end) of consecutive stretches of time, each as its innermost span."""
    changes = sorted({begin, end, *(t for span in spans for t in span[2:] if begin < t < end)})
    open_, waiting = [], sorted(spans, key=lambda each: each.begin)[::-1]
    for first, last in itertools.pairwise(changes):
        while waiting and waiting[-1].begin <= first:
            open_.append(waiting.pop())
        open_ = [each for each in open_ if each.end > first]
        yield max(open_, key=lambda each: each.begin).part if open_ else "rest", first, last


def _time_imports(watch: _Watch) -> None:
    """Counts whole imports, not the nested ones, which are as many as there are modules."""
    nested, timed = threading.local(), watch.timed

    def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
        counted = timed(_IMPORTS, function)

        def call(name: str, *given: Any, **named: Any) -> Any:
            # Most imports find their module loaded.
            if getattr(nested, "inside", False) or name in sys.modules:
                return function(name, *given, **named)
            nested.inside = True
            try:
                return counted(name, *given, **named)
            finally:
                nested.inside = False

        return call

    builtins.__import__ = outermost(builtins.__import__)
    importlib.import_module = outermost(importlib.import_module)


def _time_data(watch: _Watch) -> None:
    import trainer.setup

    trainer.setup.prepare = watch.timed(_DATA, trainer.setup.prepare)


def _time_numba(watch: _Watch) -> None:
    from numba.core.dispatcher import Dispatcher

    Dispatcher.compile = watch.timed(_NUMBA, Dispatcher.compile)


def _time_programs(watch: _Watch) -> None:
    import jax

    def heard(event: str, seconds: float, **facts: Any) -> None:
        if part := _EVENTS.get(event):
            end = time.monotonic()
            watch.spans.append(_Span(part, str(facts.get("fun_name")), end - seconds, end))

    jax.monitoring.register_event_duration_secs_listener(heard)


def _note_first_update(watch: _Watch) -> None:
    import jax

    from trainer.engine.in_flight import InFlight

    add = InFlight.add

    def first(in_flight: InFlight, state: Any) -> None:
        if not watch.updated:
            jax.block_until_ready(state)
            watch.updated = time.monotonic()
        add(in_flight, state)

    InFlight.add = first  # type: ignore[method-assign]


if __name__ == "__main__":
    _child() if _RESULTS in os.environ else main()
