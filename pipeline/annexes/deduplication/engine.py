"""One search for duplicates: checks, two jobs, list and report.

Files are written atomically, in this order:

plan.json           everything that determines the list
grams.arrays        n-grams of the evaluation sets
signatures-N.arrays one per piece of the corpus, by the first job
edges-N.arrays      one per partition of the keys, by the second
exclude.arrow, report.json; then the stages' files are deleted

The same command resumes and keeps existing files.
"""

import dataclasses
import functools
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.annexes.deduplication import arrays, contamination, plan
from pipeline.annexes.deduplication.clusters import Result, write_list
from pipeline.annexes.deduplication.edges import write_partition
from pipeline.annexes.deduplication.options import Options
from pipeline.annexes.deduplication.plan import EDGES, LIST, NONE, REPORT, SIGNATURES, Job
from pipeline.annexes.deduplication.report import as_json, corpus_of, text
from pipeline.annexes.deduplication.signatures import write_piece
from pipeline.exclusion import lists, origins, targets
from pipeline.runners import job_parts, secret
from pipeline.runners.engines import Engine, files_shown, without_pieces
from tasks.document_kind import DocumentKind
from tasks.reading import languages, sources
from tasks.reading.corpus import HUB, PYTHON_DOCS
from tasks.reading.formats.registry import FORMATS
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.programs import program

# MinHash values per unit: seven times the published maximum, Lee et al. (arXiv:2107.06499).
_MOST_VALUES = 1 << 16


def search(options: Options, runner: Engine) -> None:
    """Writes the exclude list of the corpora into `options.output` and prints a report."""
    specs = languages.specs(options.corpus, options.languages, unnamed=True)
    _check(options, specs)
    if options.hf_token_secret:
        secret.provide_hf_token(options.hf_token_secret)
    for spec in specs.values():
        runner.check(spec, options.output)
    languages.check(specs)
    share = job_parts.share(options.part)
    with (
        job_parts.claimed(options.output, "search", "--output", share) as claim,
        tempfile.TemporaryDirectory() as scratch,
    ):
        given = lists.given(options.exclude, scratch)
        for each in given:
            if each.record.paragraphs:
                raise UserError("--exclude takes lists of documents here, not of paragraphs")
        corpora = {
            name: sources.resolve(spec, options.shard_bytes, options.max_document_bytes)
            for name, spec in specs.items()
        }
        sets = [sources.resolve(sources.parse(each)) for each in _sets(options.against)]
        wanted = {
            name: targets.Target(origins.of_corpus(each), each.record)
            for name, each in corpora.items()
        }
        excluded = targets.fitted(given, wanted, scratch)
        digests = {
            name: tuple(each.record.sha256 for each in some) for name, some in excluded.items()
        }
        secret_name = options.hf_token_secret or ""
        job = Job(options.output, corpora, options.rules, bool(sets), secret_name, digests)
        for note in (note for corpus in corpora.values() for note in corpus.notes):
            print(note)
        of_sets = [each.record for each in sets]
        originals = tuple(each.original for each in given)
        record = plan.record(corpora, job.rules, of_sets, options.shard_bytes, originals)
        with claim.alone():
            _begin(job, record)
            if _is_finished(job.folder):
                _end(job, claim, "complete, nothing to do")
                return
            for each in (each for some in excluded.values() for each in some):
                files.copy(each.path, files.join(job.folder, lists.copy_name(each.record.sha256)))
        _search(job, sets, runner, originals, claim)


def _check(options: Options, specs: Mapping[str, sources.CorpusSpec]) -> None:
    for spec in specs.values():
        if options.unit == plan.PARAGRAPH and spec.unit is DocumentKind.PAIR:
            raise UserError(f"--unit={plan.PARAGRAPH} is for texts, but corpus {spec} has pairs")
    if options.duplicates == NONE and not options.against:
        raise UserError(f"--duplicates={NONE} without --against looks for nothing")
    if options.bands * options.rows > _MOST_VALUES:
        raise UserError(
            f"--bands={options.bands} --rows={options.rows}: their product, the number of "
            f"values in a signature, must be {_MOST_VALUES:,} or less"
        )
    if not all(each.strip() for each in options.against):
        raise UserError("--against is empty: name evaluation sets, or leave it out")


def _sets(against: Sequence[str]) -> list[str]:
    """Returns the SPECs of --against; white space divides them where another SPEC begins."""
    kinds = "|".join(map(re.escape, (HUB, *FORMATS)))
    begins = rf"\s+(?=(?:{kinds}):|{PYTHON_DOCS}(?:\s|\?|$))"
    return [spec for each in against for spec in re.split(begins, each.strip())]


def _is_finished(folder: str) -> bool:
    return all(files.exists(files.join(folder, name)) for name in (LIST, REPORT))


def _search(
    job: Job,
    sets: list[sources.Corpus],
    runner: Engine,
    originals: tuple[str, ...],
    claim: job_parts.Claim,
) -> None:
    started = time.monotonic()
    summaries = contamination.write_grams(job.folder, sets, job.rules.ngram) if sets else []
    pieces = job.pieces
    some = {name: without_pieces(corpus) for name, corpus in job.corpora.items()}
    slim = dataclasses.replace(job, corpora=some)
    mine = claim.share.of(range(len(pieces)))
    to_do = _missing(job, SIGNATURES, mine)
    read = sum(pieces[number][1].bytes for number in to_do)
    sizes = {_name(job.path(SIGNATURES, number)): pieces[number][1].bytes for number in mine}
    with files_shown("reading", job.folder, sizes, "B"):
        if to_do:
            work = functools.partial(write_piece, slim)
            runner.run(work, [(n, *pieces[n]) for n in to_do], job.folder)
    seconds = time.monotonic() - started
    claim.check()
    there = files.list_names(job.folder)
    unread = [n for n in range(len(pieces)) if _name(job.path(SIGNATURES, n)) not in there]
    if unread and not _is_finished(job.folder):
        if lost := set(unread).intersection(mine):
            raise UserError(
                f"the job succeeded, but {len(lost):,} of {len(mine):,} {SIGNATURES} are missing "
                f"in {job.folder}: run the same command to make them"
            )
        print(claim.unfinished(unread, len(pieces)))
        return
    with claim.alone():
        if _is_finished(job.folder):
            _end(job, claim, "completed by another part")
            return
        if unread := _missing(job, SIGNATURES, range(len(pieces)), quiet=True):
            print(claim.unfinished(unread, len(pieces)))
            return
        result = _compared(job, slim, runner, claim, _header(job, originals))
        total = time.monotonic() - started
        report = as_json(job, result, summaries, {"read": read, "reading": seconds, "all": total})
        files.write_json(files.join(job.folder, REPORT), report)
        print(text(job, result, summaries))
        _end(
            job,
            claim,
            f"read {read / 1e6:,.1f} MB in {seconds:.1f} s, "
            f"{read / 1e6 / max(seconds, 1e-9):.1f} MB/s; {total:.1f} s in all\n"
            f"next: {program('pipeline.build')} … --exclude={files.join(job.folder, LIST)}",
        )


def _compared(
    job: Job, slim: Job, runner: Engine, claim: job_parts.Claim, header: dict[str, Any]
) -> Result:
    """Compares the signatures of all pieces, and writes the list."""
    pieces = len(job.pieces)
    units = sum(
        arrays.Arrays(job.path(SIGNATURES, number)).shape("owner")[0] for number in range(pieces)
    )
    count = plan.partitions(units)
    to_do = _missing(job, EDGES, range(count))
    ones = {_name(job.path(EDGES, number)): 1 for number in range(count)}
    with files_shown("comparing", job.folder, ones):
        if to_do:
            work = functools.partial(write_partition, slim, pieces, count)
            runner.run(work, to_do, job.folder)
    claim.check()
    return write_list(job, pieces, count, header)


def _end(job: Job, claim: job_parts.Claim, words: str) -> None:
    """Deletes the stages' files of a finished search."""
    _clear(job.folder)
    claim.tidy()
    print(f"{files.join(job.folder, LIST)}: {words}")


def _header(job: Job, originals: tuple[str, ...]) -> dict[str, Any]:
    """Returns what else a list says of itself, besides its origins."""
    kind = lists.IDS if job.rules.duplicates == NONE else lists.DUPLICATES
    (longest,) = {corpus.max_document_bytes for corpus in job.corpora.values()}
    return {
        "kind": kind,
        "corpus": corpus_of(job),
        "max_document_bytes": longest,
        "rules": dataclasses.asdict(job.rules),
        **({"exclude": list(originals)} if originals else {}),
    }


def _begin(job: Job, record: dict[str, Any]) -> None:
    path = files.join(job.folder, plan.PLAN)
    ours = json.loads(json.dumps(record))
    try:
        theirs = files.read_json(path)
    except FileNotFoundError:
        others = [name for name in files.list_names(job.folder) if not name.startswith(".")]
        if others:
            raise UserError(
                f"{job.folder} holds {others[0]} but no {plan.PLAN}: choose another --output"
            ) from None
        files.write_json(path, record)
        return
    differ = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if differ == ["format"]:  # of version 0.2.0, whose finished list serves this corpus
        if not _is_finished(job.folder):
            _clear(job.folder)
            files.write_json(path, record)
        return
    if "rules" in differ and isinstance(theirs.get("rules"), dict):
        rules = ours["rules"]
        differ.remove("rules")
        differ += [
            f"{key}: {rules[key]}, there: {theirs['rules'].get(key)}"
            for key in rules
            if rules[key] != theirs["rules"].get(key)
        ]
    if differ:
        raise UserError(
            f"{job.folder} holds a search with other settings ({'; '.join(differ)}): choose "
            "another --output, or use the flags that it was started with"
        )


def _missing(job: Job, stage: str, numbers: Sequence[int], quiet: bool = False) -> list[int]:
    there = files.list_sizes(job.folder, f"{stage}-")
    missing = [
        number
        for number in numbers
        if _name(job.path(stage, number)) not in there
        or not arrays.is_complete(job.path(stage, number))
    ]
    if len(missing) < len(numbers) and not quiet:
        print(f"kept {len(numbers) - len(missing):,} of {len(numbers):,} {stage}")
    return missing


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _clear(folder: str) -> None:
    for name in files.list_sizes(folder):
        if name.startswith((plan.GRAMS, lists.COPY, f"{SIGNATURES}-", f"{EDGES}-")):
            files.remove(files.join(folder, name))
