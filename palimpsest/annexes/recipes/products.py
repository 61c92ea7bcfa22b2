"""Hashes of what stages made; they depend on nothing but the recipe and its corpora."""

import collections
import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from palimpsest.annexes.recipes.derived_flags import RUNS
from palimpsest.annexes.recipes.recipe import Stage
from tasks import annexes
from tasks.cache import language_set
from tasks.cache.manifest import MANIFEST, CacheManifest
from tasks.reading import languages
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import VOCABULARY_FILES

_COUNTED = ("documents", "tokens", "rows", "text_bytes")
# Columns of an exclude list that say what is listed, and why.
_LISTED = ("high", "low", "place", "paragraph", "reason")
_EXPORTED = (".safetensors", ".json", ".model")
# Written by an export beside the model, with times or paths.
_NOT_HASHED = ("conversion.json",)
_CARD = "README.md"  # of an export, which its readers may edit
STEP = "checkpoint_"

Product = dict[str, Any]
# Path below the folder of a stage's output -> bytes; None for a file that may grow.
Sizes = dict[str, int | None]


def product(stage: Stage) -> Product | None:
    """Returns what a stage made, as hashes and figures by name; None if it is not whole."""
    try:
        return _OF_KIND[stage.kind](stage)
    except (UserError, FileNotFoundError, KeyError, TypeError, ValueError, AttributeError):
        return None


def places(stage: Stage) -> list[str]:
    """Returns the files and folders that a stage makes: each language has a cache of its own."""
    if stage.kind != "cache" or "corpus" not in stage.flags:
        return [stage.output]
    cache_dir, _, task = stage.output.rpartition("/")
    names = languages.specs(stage.flags["corpus"], stage.flags.get("languages", (None,))[0])
    caches = (language_set.cache_of(task, name) for name in names if name)
    return [stage.output, *(files.join(cache_dir, cache) for cache in caches)]


def sizes(stage: Stage, made: Product) -> Sizes:
    """Returns the files of a product that its readers need, without a look into them."""
    if stage.kind == "cache":
        cache_dir = stage.output.rpartition("/")[0]
        return {
            f"../{task}/{name}": size
            for task in made
            for name, size in files.list_sizes(files.join(cache_dir, task)).items()
            if not name.startswith(".")
        }
    if stage.kind in RUNS:
        names = {"config.json", *VOCABULARY_FILES} & {*files.list_names(stage.output)}
        state = f"{STEP}{made.get('step')}/state"
        found = files.list_tree(files.join(stage.output, state))
        return dict.fromkeys(names) | {f"{state}/{name}": found[name] for name in found}
    if stage.kind in ("evaluate", "report"):  # the same file may hold others' figures
        return {}
    return {name: size for name, size in files.list_tree(stage.output).items() if name != _CARD}


def lost(stage: Stage, made: Product, before: Sizes) -> str:
    """Returns the first file of a product that is gone or has another size; "" if none is."""
    now = sizes(stage, made)
    for name, size in before.items():
        if name not in now or size not in (None, now[name]):
            return name.removeprefix("../")
    return ""


def mends(stage: Stage, gone: str) -> bool:
    """Returns whether a stage's command makes whole what is left of its product, without `gone`."""
    if stage.kind == "evaluate" and not stage.output.endswith(".jsonl"):
        with contextlib.suppress(FileNotFoundError):
            try:
                files.read_json(stage.output)  # the command adds to it
            except UserError:
                return False
    whole = stage.kind in ("cache", "evaluate", "report") or not files.exists(stage.output)
    # Of a damaged checkpoint, the command says what can be done.
    return whole or (stage.kind in RUNS and (not gone or gone.startswith(STEP)))


def _dedup(stage: Stage) -> Product:
    """Returns a hash of what is listed, without the header, which has the corpora's places."""
    import pyarrow as pa

    listed = pa.ipc.open_file(
        files.read_bytes(files.join(stage.output, "exclude.arrow"))
    ).read_all()
    columns = (listed.column(name).to_numpy().tobytes() for name in _LISTED)
    digest = hashlib.sha256(b"".join(columns)).hexdigest()
    return {"sha256": digest, "entries": listed.num_rows}


def _vocabulary(stage: Stage) -> Product | None:
    path = files.join(stage.output, MANIFEST)
    if not files.exists(path):
        return None
    corpus = files.read_json(path).get("corpus")
    return {
        name: files.sha256(path)
        for name in VOCABULARY_FILES
        if files.exists(path := files.join(stage.output, name))
    } | ({"corpus": _corpus(corpus)} if corpus else {})


def _cache(stage: Stage) -> Product:
    cache_dir, _, task = stage.output.rpartition("/")
    names = language_set.languages(cache_dir, task)
    tasks = [language_set.cache_of(task, name) for name in names] or [task]
    return {each: _of_cache(files.join(cache_dir, each)) for each in tasks}


def _of_cache(folder: str) -> dict[str, Any]:
    """Returns a cache's counts, and one hash of all its files with rows, index and lineage."""
    manifest = CacheManifest.load(folder)
    shards = [shard for split in sorted(manifest.splits) for shard in manifest.splits[split]]
    written = (f"{name} {shard.files[name].sha256}" for shard in shards for name in shard.files)
    dropped = collections.Counter[str]()
    for shard in shards:
        dropped.update(shard.dropped)
    counted = {name: sum(getattr(each, name) for each in shards) for name in _COUNTED}
    return {
        "sha256": _hash(sorted(written)),
        "corpus": _corpus(manifest.plan.corpus),
        **counted,
        "dropped": dict(sorted(dropped.items())),
    }


def _corpus(record: Mapping[str, Any]) -> Product:
    """Returns what identifies a corpus wherever it lies: its revision, or a hash of its files."""
    if "corpora" in record:
        return {name: _corpus(each) for name, each in record["corpora"].items()}
    found = {name: record[name] for name in ("revision", "python", "sha256") if record.get(name)}
    if listed := record.get("files"):
        # Its name depends on the folder in which a pattern begins.
        states = ({key: each[key] for key in each if key != "name"} for each in listed)
        found["files"] = len(listed)
        found["sha256"] = _hash(sorted(json.dumps(state, sort_keys=True) for state in states))
    return found


def _pretrain(stage: Stage) -> Product | None:
    from trainer.checkpoints import metadata

    step, described = metadata.newest(stage.output)
    if not step:
        return None
    sums = described[metadata.CHECKSUMS]
    return {"step": step, "sha256": _hash(f"{name} {sums[name]}" for name in sorted(sums))}


def _evaluate(stage: Stage) -> Product | None:
    """Returns step -> split -> metrics, of the steps and the split that the stage evaluates.

    The user may have added others to the same file.
    """
    if stage.output.endswith(".jsonl"):
        return {"lines": [json.loads(line) for line in files.read_lines(stage.output)]}
    from trainer.checkpoints import metadata
    from trainer.config import averages

    flags = {name: texts[0] for name, texts in stage.flags.items()}
    steps, split = flags.get("steps", "latest"), flags.get("split", "validation")
    if steps == "latest":
        steps = str(metadata.newest(flags["model_dir"])[0])
    split = next((name for name in annexes.entries("evaluate") if name in flags), split)
    label = averages.label(split, flags["average"]) if flags.get("average") else split
    labels = (label, f"{flags.get('task')}:{label}")
    found = {
        step: {name: of_split[name] for name in of_split if name.partition("/")[0] in labels}
        for step, of_split in files.read_json(stage.output)["checkpoints"].items()
        if steps == "all" or step in steps.split(",")
    }
    metrics = {step: of_split for step, of_split in found.items() if of_split}
    return {"metrics": metrics} if metrics else None


def _report(stage: Stage) -> Product | None:
    return {} if files.exists(stage.output) else None


def _export(stage: Stage) -> Product | None:
    if stage.command == "export_t5x":
        # Files with values have random names; the hash of the run's checkpoint decides them.
        return {
            name: files.sha256(files.join(stage.output, name, "state/_METADATA"))
            for name in files.list_names(stage.output)
            if re.fullmatch(rf"{STEP}\d+", name)
        } or None
    names = [name for name in files.list_names(stage.output) if name.endswith(_EXPORTED)]
    return {
        name: files.sha256(files.join(stage.output, name))
        for name in sorted(names)
        if name not in _NOT_HASHED
    } or None


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_OF_KIND: Mapping[str, Callable[[Stage], Product | None]] = {
    "dedup": _dedup,
    "vocabulary": _vocabulary,
    "cache": _cache,
    "pretrain": _pretrain,
    "finetune": _pretrain,
    "evaluate": _evaluate,
    "report": _report,
    "export": _export,
}
