"""Builds a task in several languages: one cache each, as if that language were built alone."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.building import engine, lifecycle, planning, summary
from pipeline.building.options import Options
from pipeline.exclusion import lists, targets
from pipeline.runners import job_parts
from pipeline.runners.engines import Engine
from tasks import annexes, registry
from tasks.cache import language_set
from tasks.cache.manifest import MANIFEST, CacheManifest, Plan
from tasks.mixture import MixtureSpec
from tasks.reading import languages
from tasks.reading.corpus import CorpusSpec
from tasks.storage import files
from tasks.task import OBJECTIVES
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table

# mT5's value. Source: Xue et al. 2021 (arXiv:2010.11934), section 3.2.
_ALPHA = 0.3


def build(options: Options, runner: Engine) -> None:
    """Builds the cache of a task, or of each of its languages, and prints a report."""
    if not options.corpus:
        if options.languages is not None:
            raise UserError(f"--languages={options.languages} needs a --corpus: {languages.FORMS}")
        return engine.build(options, runner)
    if options.task_module:
        registry.load(options.task_module)  # it may register corpus formats
    corpora = languages.specs(options.corpus, options.languages)
    if list(corpora) == [""]:
        return engine.build(options, runner)
    task = _task(options)
    languages.check(corpora)
    names = _all_languages(options, task, list(corpora))
    with tempfile.TemporaryDirectory() as scratch:
        plans, of_task = _planned(options, task, corpora, scratch)
        dry_run = engine.dry_run_of(options)
        if not dry_run and set(names) == set(corpora) and of_task and of_task.some:
            with _alone(of_task.folder, options):
                of_task.keep()
        for number, (language, planned) in enumerate(plans.items(), 1):
            which = f"language {language}, {number} of {len(corpora)}: {planned.of.spec}"
            print(which, file=options.notes, flush=True)
            with _of_language(language):
                if dry_run:
                    dry_run(planned, runner)
                    continue
                with engine.locked(planned.of, runner) as claim:
                    engine.run(planned, claim, runner, advise=False)
    if dry_run:
        return None
    finished = [files.exists(files.join(plan.job.folder, MANIFEST)) for plan in plans.values()]
    if not all(finished):  # another part will finish them
        return None
    with _alone(files.join(options.cache_dir, task), options):
        language_set.write(options.cache_dir, task, names)
    _report(options, task, names)
    return None


@contextlib.contextmanager
def _alone(folder: str, options: Options) -> Iterator[None]:
    """Locks the folder of the task, for which parts of a build wait."""
    share = job_parts.share(options.part)
    with job_parts.claimed(folder, "build", "--cache_dir", share) as claim, claim.alone():
        yield
        claim.tidy()


def _planned(
    options: Options,
    task: str,
    corpora: Mapping[str, CorpusSpec],
    scratch: str,
) -> tuple[dict[str, planning.Planned], Any]:
    """Returns the plans of all languages, and their lists: the slot's `of_languages`, or None.

    Raises a UserError if a plan does not fit its cache, or the caches of the other languages.
    """
    listed, plans, cache_dir = {}, {}, options.cache_dir
    given = lists.given(options.exclude, scratch)
    of_build = annexes.get(targets.SLOT, "of_languages")
    if not of_build and (given or files.exists(files.join(cache_dir, task, lists.OF_LANGUAGES))):
        raise UserError("exclude lists are for one corpus: build each language with its own --name")
    for language, spec in corpora.items():
        alone = dataclasses.replace(
            options, name=f"{options.name}_{language}", corpus=(str(spec),), languages=None
        )
        with _of_language(language):
            listed[language] = planning.listed(planning.checked(alone))
    wanted = {language: each.target for language, each in listed.items()}
    of_task = of_build(cache_dir, task, wanted, given, scratch) if of_build else None
    for language, each in listed.items():
        with _of_language(language):
            planned = planning.planned(each, of_task.of_languages[language] if of_task else [])
            lifecycle.check(planned.job.folder, planned.job.plan, options.extend)
            plans[language] = planned
    known = [language_set.cache_of(task, name) for name in language_set.languages(cache_dir, task)]
    existing = next(
        filter(None, (lifecycle.planned(files.join(cache_dir, one)) for one in known)), None
    )
    for language, each in listed.items():
        if existing and not each.existing:
            _check_alike(language, plans[language].job.plan, existing)
    return plans, of_task


def _check_alike(language: str, ours: Plan, existing: Plan) -> None:
    """Raises a UserError if a new language would have other rows than the others."""
    how = ("packing", "row_tokens", "separator", "pairs", "spelling", "sentencepiece_law")
    fields = ("vocabulary", *how)
    same = {name: getattr(ours, name) for name in fields}
    if different := dataclasses.replace(existing, **same).difference(existing):
        raise UserError(
            f"language {language} would have other rows than {existing.task} "
            f"({'; '.join(different[:3])}): use the flags that the other languages were built with"
        )


@contextlib.contextmanager
def _of_language(language: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"language {language}: {error}") from error


def _task(options: Options) -> str:
    if options.name is None or options.task not in OBJECTIVES:
        raise UserError(
            "several languages need --name=NAME and, as --task, one of the objectives "
            f"{', '.join(OBJECTIVES)}: each language is then the task NAME_LANGUAGE_OBJECTIVE"
        )
    task = planning.named_task(options)
    if files.exists(files.join(options.cache_dir, task, MANIFEST)):
        raise UserError(
            f"{files.join(options.cache_dir, task)} is a cache of one corpus: choose another "
            "--name or --cache_dir for several languages"
        )
    return task


def _all_languages(options: Options, task: str, given: list[str]) -> list[str]:
    """Returns all languages of the task after the build."""
    known = language_set.languages(options.cache_dir, task)
    added = [name for name in given if name not in known]
    if not known:
        return given
    if added and not options.extend:
        raise UserError(
            f"{task} in {options.cache_dir} has the languages {', '.join(known)}, not "
            f"{', '.join(added)}: pass --extend to add them"
        )
    return [*known, *added]


def _report(options: Options, task: str, names: list[str]) -> None:
    cells = [language_set.cache_of(task, name) for name in names]
    manifests = [CacheManifest.load(files.join(options.cache_dir, cell)) for cell in cells]
    counts = [
        [manifest.total("train", each) for each in ("documents", "tokens", "rows", "text_bytes")]
        for manifest in manifests
    ]
    held_out = [
        manifest.total("validation", "documents") if "validation" in manifest.splits else 0
        for manifest in manifests
    ]
    spec = MixtureSpec(task, tuple((name, None) for name in names), alpha=_ALPHA)
    sizes = {name: float(max(count[1], 1)) for name, count in zip(names, counts, strict=True)}
    weights = spec.weights(sizes)
    total = sum(sizes.values())
    rows = [
        _row(name, count, held, sizes[name] / total, weights[name] / sum(weights.values()))
        for name, count, held in zip(names, counts, held_out, strict=True)
    ]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    rows.append(_row("all", sums, sum(held_out), 1.0, 1.0))
    header = ["language", "documents", "tokens", "rows", "MB", "bytes a token", "held out"]
    print(table([*header, "share of tokens", f"at alpha {_ALPHA}"], rows))
    command = summary.next_command(
        registry.get(task, options.task_module), options, held_out=any(held_out)
    )
    sampling = f" --mixing.alpha={_ALPHA}" if len(names) > 1 else ""  # refused if nothing is mixed
    print(f"next: {command}{sampling}")


def _row(
    name: str, counts: list[int], held_out: int, share: float, sampled: float
) -> tuple[str, ...]:
    documents, tokens, rows, size = counts
    return (
        *(name, f"{documents:,}", f"{tokens:,}", f"{rows:,}", f"{size / 1e6:,.2f}"),
        *(f"{size / max(tokens, 1):.2f}", f"{held_out:,}", f"{share:.2%}", f"{sampled:.2%}"),
    )
