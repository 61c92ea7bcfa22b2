"""Kills of searches for duplicates, of builds with exclude lists, and of takedowns."""

import dataclasses
import json
import pathlib
import random
import shutil
import time
from collections import Counter

from pipeline.deduplication.plan import LIST
from pipeline.faults.harness import Fault, Harness, Outcome, Trial, checksums, documents_of
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal.command_line import UserError

# Documents of the text file of ids, and kills of one search or build.
_LISTED = 20
_PER_TRIAL = 3
# Share of the kills that come before anything is written, during imports.
_STARTUP_SHARE = 0.2


def faults(others: int) -> list[Fault]:
    """Returns faults with three kills for each of `others`."""
    return [
        Fault(name, 3 * others, inject, _PER_TRIAL)
        for name, inject in (
            ("search for duplicates killed", _kill_search),
            ("build with exclude lists killed", _kill_build),
            ("takedown killed", _kill_takedown),
        )
    ]


@dataclasses.dataclass(frozen=True)
class _Reference:
    """A search and a build with its list that nothing disturbed.

    Attributes:
      lists: what --exclude is given: a list of duplicates and a text file of ids.
      sha256: checksum of the list of duplicates.
      expected: checksums of the cache built with both.
      documents: its documents.
      search_seconds: duration of the search.
    """

    lists: str
    sha256: str
    expected: dict[str, str]
    documents: Counter[tuple]
    search_seconds: float


def _reference(harness: Harness) -> _Reference:
    """Returns the reference, made by the first trial that needs it."""
    with harness.lock:
        if "without" not in harness.further:
            harness.further["without"] = _made(harness)
        return harness.further["without"]


def _made(harness: Harness) -> _Reference:
    trial = Trial(harness, Outcome("none"), "without")
    trial.folder.mkdir()
    begin = time.monotonic()
    search = trial.launch_search(1)
    if trial.wait(search):
        raise UserError(f"the search without faults failed: {search.log_tail()}")
    seconds = time.monotonic() - begin
    ids = sorted({name for _, name, *_ in harness.documents})
    chosen = random.Random(harness.flags.seed).sample(ids, min(_LISTED, len(ids)))
    (trial.folder / "ids.txt").write_text("\n".join(chosen))
    trial.exclude = f"{trial.search / LIST},{trial.folder / 'ids.txt'}"
    build = trial.launch(1)
    if trial.wait(build):
        raise UserError(f"the build with exclude lists failed: {build.log_tail()}")
    check_accounts(harness, trial.cache)
    return _Reference(
        trial.exclude,
        files.sha256(str(trial.search / LIST)),
        checksums(trial.cache),
        documents_of(trial.cache),
        seconds,
    )


def check_accounts(harness: Harness, cache: pathlib.Path) -> None:
    """Checks that every document of the corpus is in the cache or left out, exactly once.

    All other caches have the same bytes.
    """
    corpus = sources.resolve(sources.parse(f"json:{harness.corpus}/*.jsonl?{harness.sides}"))
    read = Counter(
        name
        for piece in corpus.pieces
        for _, batch in sources.read(corpus, piece)
        for name in batch.column("id").to_pylist()
    )
    kept = Counter(name for _, name, offset, *_ in documents_of(cache).elements() if not offset)
    for path in cache.glob("*.quarantine-*"):
        kept.update(json.loads(line)["id"] for line in files.read_lines(str(path)))
    if kept != read:
        lost, twice = (read - kept).total(), (kept - read).total()
        raise UserError(f"{cache}: {lost:,} documents are nowhere, and {twice:,} twice")


def _kill_search(trial: Trial) -> None:
    """Kills searches at any moment, with any number of workers; the list must be the same."""
    reference = _reference(trial.harness)
    trial.folder.mkdir(exist_ok=True)
    for _ in range(trial.injections):
        search = trial.launch_search(trial.draw_workers())
        if trial.random.random() < _STARTUP_SHARE:
            time.sleep(trial.random.uniform(0, reference.search_seconds / 2))
        else:
            trial.wait_for(search, lambda: any(trial.search.glob("*.arrays")))
            time.sleep(trial.random.uniform(0, reference.search_seconds / 4))
        if not trial.kill(search):
            trial.count_injection()  # too late, and the trial still tells whether all is there
    search = trial.launch_search(trial.draw_workers())
    if trial.finish(search):
        trial.fail(f"the last search failed: {search.log_tail()}")
    trial.outcome.caches += 1
    path = trial.search / LIST
    left = sorted(each.name for each in trial.search.iterdir())
    if left != [LIST, "plan.json", "report.json"]:
        trial.fail(f"{trial.search} holds {', '.join(left)}")
    elif files.sha256(str(path)) != reference.sha256:
        trial.fail(f"{path} differs")
    else:
        trial.outcome.equal += 1
        shutil.rmtree(trial.search)


def _kill_build(trial: Trial) -> None:
    _expect(trial)
    kill_and_audit(trial)


def _kill_takedown(trial: Trial) -> None:
    """Kills builds that take documents out of a finished cache."""
    trial.copy_reference()
    _expect(trial)
    kill_and_audit(trial)


def _expect(trial: Trial) -> None:
    reference = _reference(trial.harness)
    trial.exclude = reference.lists
    trial.expected, trial.documents = reference.expected, reference.documents


def kill_and_audit(trial: Trial) -> None:
    """Kills builds at any moment, with any number of workers, then audits the finished cache."""
    for _ in range(trial.injections):
        build = trial.launch(trial.draw_workers())
        to_first_row, writing = trial.harness.seconds
        if trial.random.random() < _STARTUP_SHARE:
            time.sleep(trial.random.uniform(0, to_first_row))
        else:
            trial.wait_for_rows(build)
            time.sleep(trial.random.uniform(0, writing / 2))
        if not build.running and trial.wait(build):
            trial.fail(f"the build failed: {build.log_tail()}")
        if not trial.kill(build):
            trial.count_injection()  # too late, and the trial still tells whether all is there
    trial.rebuild_and_audit()
