"""Kills of builds with filters."""

import dataclasses
from collections import Counter

from pipeline.faults import exclusion
from pipeline.faults.harness import Fault, Harness, Outcome, Trial, checksums, documents_of
from tasks.terminal.command_line import UserError

_FILTERS = (
    "--filter=gopher_quality?min_words=8&min_stop_words=1",
    "--filter=pii",
    "--filter=c4?min_sentences=1&min_line_words=3",
)
_PER_TRIAL = 3


def faults(others: int) -> list[Fault]:
    """Returns the fault, with three kills for each of `others`."""
    return [Fault("build with filters killed", 3 * others, _kill_build, _PER_TRIAL)]


@dataclasses.dataclass(frozen=True)
class _Reference:
    """Checksums and documents of a filtered cache that nothing disturbed."""

    expected: dict[str, str]
    documents: Counter[tuple]


def _reference(harness: Harness) -> _Reference:
    """Returns the reference, made by the first trial that needs it."""
    with harness.lock:
        if "filtered" not in harness.further:
            harness.further["filtered"] = _made(harness)
        return harness.further["filtered"]


def _made(harness: Harness) -> _Reference:
    trial = Trial(harness, Outcome("none"), "filtered")
    trial.filters = _FILTERS
    build = trial.launch(1)
    if trial.wait(build):
        raise UserError(f"the build with filters failed: {build.log_tail()}")
    exclusion.check_accounts(harness, trial.cache)
    documents = documents_of(trial.cache)
    if not (harness.documents - documents):
        raise UserError("the filters drop nothing of this corpus: choose another for this test")
    return _Reference(checksums(trial.cache), documents)


def _kill_build(trial: Trial) -> None:
    reference = _reference(trial.harness)
    trial.filters = _FILTERS
    trial.expected, trial.documents = reference.expected, reference.documents
    exclusion.kill_and_audit(trial)
