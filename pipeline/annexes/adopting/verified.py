"""Verifies another program's cache by scanning its files again, as the adoption did."""

import functools
import hashlib

from pipeline.annexes.adopting import engine, megatron, seqio_cache
from pipeline.annexes.adopting.options import PAIRS, TARGETS, Options
from pipeline.verification.shard import Checked, Fault
from tasks.cache.manifest import MANIFEST, CacheManifest, Plan, Shard, shard_file
from tasks.storage import files
from tasks.terminal.command_line import UserError

_AGAIN = "run palimpsest adopt again"


class AdoptedChecker:
    """Checks record files of one cache."""

    def __init__(self, folder: str, plan: Plan):
        assert plan.adopted
        self._folder, self._plan = folder, plan
        self._source = plan.adopted.folder or folder
        self._scan = functools.partial(megatron.scan, self._source)
        if not plan.adopted.token:
            self._scan = functools.partial(
                seqio_cache.scan, self._source, plan.pairs is not None, False
            )

    def __call__(self, split: str, index: int, shard: Shard) -> Checked:
        """Checks file `index` of `split`; a file that cannot be read raises an OSError."""
        rows = shard_file(split, "rows", index, self._plan.shards[split])
        name = next((file for file in shard.files if file != rows), "")
        checked = Checked([], size=sum(entry.bytes for entry in shard.files.values()))
        if set(shard.files) != {rows, name}:  # the manifest contradicts itself
            return checked
        advice = self._plan.remedy.redo
        try:
            data = files.read_bytes(files.join(self._folder, rows))
            if hashlib.sha256(data).hexdigest() != shard.files[rows].sha256:
                checked.faults.append(Fault(rows, "its bytes were changed", _AGAIN))
        except FileNotFoundError:
            checked.faults.append(Fault(rows, "missing", _AGAIN))
        try:
            vocabulary = self._plan.vocabulary
            scan = self._scan(name, vocabulary.size, vocabulary.special_ids.eos)
            seen = engine.shard_of(name, rows, scan)
        except (FileNotFoundError, UserError) as error:
            what = str(error) if isinstance(error, UserError) else "missing"
            checked.faults.append(Fault(name, what, advice))
            return checked
        if seen.files[name] != shard.files[name]:
            checked.faults.append(Fault(name, "its bytes were changed since the adoption", advice))
        elif seen != shard:
            checked.faults.append(Fault(MANIFEST, f"it has different counts for {name}", _AGAIN))
        checked.rows, checked.tokens = seen.rows, seen.tokens
        checked.documents = seen.documents
        return checked


def check_shared_files(folder: str, manifest: CacheManifest) -> list[Fault]:
    """Returns the faults of files outside shards."""
    plan = manifest.plan
    assert plan.adopted
    faults = [Fault(MANIFEST, problem, _AGAIN) for problem in manifest.contradictions()]
    read = None if plan.adopted.token else PAIRS if plan.pairs else TARGETS
    source = plan.adopted.folder or folder
    try:
        found = engine.survey(Options(cache_dir=source, read=read))
        engine.check_examples(source, found, manifest.splits)
    except UserError as error:
        faults.append(Fault(MANIFEST, f"it does not fit its cache: {error}", _AGAIN))
    name, wanted = plan.vocabulary.file_name, plan.vocabulary.sha256
    path = files.join(folder, name)
    if wanted and not (files.exists(path) and files.sha256(path) == wanted):
        faults.append(Fault(name, "not the vocabulary of the rows, or missing", _AGAIN))
    return faults
