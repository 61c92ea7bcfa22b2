"""The rules by which a rehearsal shrinks a recipe: its tables, models and transformers folders."""

import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from palimpsest.annexes.recipes import derived_flags
from palimpsest.annexes.recipes import recipe as recipes
from palimpsest.annexes.recipes.derived_flags import RUNS
from palimpsest.annexes.recipes.rehearsals.samples import Samples
from palimpsest.commands import COMMANDS, command
from tasks import registry
from tasks.objectives.supervised import CUT
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import Flag, flags_of
from tasks.terminal.toml_flags import as_text
from trainer.config import Config, from_transformers
from trainer.model.config import ModelConfig

UPDATES = 20
_PIECES = 1000
# Where the real stages run and write, and what only a long or distributed run needs.
_OF_RUN = (
    *("cache_dir", "model_dir", "data.local_dir", "metrics.wandb", "profile_steps"),
    *("tokens_per_batch", "microbatches", "data.skip", "on_event", "train_tokens", "rewind_to"),
)
_DROPPED = {
    "dedup": ("output", "runner", "workers", "part"),
    "vocabulary": ("output", "runner", "workers"),
    "cache": ("cache_dir", "runner", "workers", "part", "hf_token_secret", "shard_bytes"),
    "pretrain": _OF_RUN,
    "finetune": _OF_RUN,
    "evaluate": ("model_dir", "output", "cache_dir", "plot", "steps"),
    "report": ("model_dir", "output", "cache_dir", "picture"),
    "export": ("model_dir", "output", "cache_dir", "push_to", "step"),
}
# Flags that name what a stage writes, or what its readers add to.
_PLACES = ("cache_dir", "model_dir", "data.local_dir", "output", "plot", "picture")
_DROPPED_GROUPS = ("mesh.", "processes.")
_EVALUATIONS = "evaluation.every_steps"
# Of as many checkpoints as a rehearsal's runs keep.
_AVERAGE = "last:2"
_RUN: Mapping[str, Any] = {
    "train_steps": UPDATES,
    "metrics.every_steps": UPDATES // 4,
    "checkpoint.every_steps": UPDATES // 2,
    _EVALUATIONS: UPDATES // 2,
}
# What gin files set and tables leave out.
_OF_GIN = {"tokens_per_batch": "None", "microbatches": 1, "mesh.data": -1, "mesh.fsdp": 1}
_OF_GIN |= {"mesh.tensor": 1}
# The largest values in a rehearsal; heads times their size is the width, which some models need.
_SMALL = {
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "emb_dim": 64,
    "num_heads": 4,
    "head_dim": 16,
    "mlp_dim": 128,
}
_START = "init_from"
# Setting of objectives for pairs.
_TOO_LONG = "too_long"
# Rows of a batch: at most, at least, and as many as hold so many positions, half for a large table.
_MOST, _LEAST, _POSITIONS, _LARGE = 8, 2, 4096, 65_536
# Weights in the formats of transformers' releases.
_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".index.json", ".ckpt", ".pt", ".pth")


def tables(
    whole: recipes.Tables,
    runs: Mapping[str, Config | None],
    devices: int,
    scratch: pathlib.Path,
) -> dict[str, dict[str, Any]]:
    """Returns the tables of a recipe for its rehearsal; writes what they read below `scratch`.

    `runs` are the configurations of the real runs, by the names of their stages; the small ones
    have `devices`.
    """
    sampled = Samples(scratch, max((_window(run) for run in runs.values()), default=0))
    corpora = [name for name in whole if name.startswith("corpus.")]
    found: dict[str, dict[str, Any]] = {}
    is_sampled = False  # the vocabulary: its pieces are shorter than the recipe's
    for name, table in whole.items():
        kind = name.partition(".")[0]
        left_out = _DROPPED.get(kind, ())
        known = _flags(kind, table)
        given = {_spelled(key, known): value for key, value in table.items()}
        model = as_text(given.get("model_dir", ""))
        if kind in derived_flags.MAY_BE_NAMED and "{" in model:  # of a stage
            left_out = tuple(each for each in left_out if each != "model_dir")
        elif model and kind in derived_flags.MAY_BE_NAMED and not _has_model(name, whole):
            continue  # of a model elsewhere
        # A runner has flags of its own, such as Dataflow's project.
        own = {*known, *derived_flags.OF_RECIPE} if "runner" in given else given.keys()
        flat = {
            key: value
            for key, value in given.items()
            if key not in left_out and key in own and not key.startswith(_DROPPED_GROUPS)
        }
        if "corpus" in flat or kind == "corpus":
            flat |= sampled.of(name, flat.get("corpus", ""), flat.pop("languages", None))
        elif kind == "cache" and not corpora:
            spec = registry.get(as_text(flat.get("task")), flat.get("task_module")).corpus
            flat |= sampled.of(name, spec, None)
        if kind == "dedup" and "against" in flat:
            flat["against"] = [
                sampled.of(name, each, None)["corpus"] for each in _listed(flat["against"])
            ]
        if kind in ("dedup", "cache") and "exclude" in flat:
            flat |= _lists(name, flat.pop("exclude"))
        if kind == "vocabulary":
            read = [
                f"corpus.{each}" for each in _listed(flat.get(derived_flags.CORPORA, []))
            ] or corpora
            of = [flat] if "corpus" in flat else [found[each] for each in read]
            texts = [text for each in of for text in _listed(each["corpus"])]
            if not sampled.are_whole(texts):  # else it shows how many pieces there are
                size = as_text(flat.get("vocab_size", _PIECES))
                flat["vocab_size"] = min(known["vocab_size"].parsed("vocab_size", size), _PIECES)
                is_sampled = True
        if str(flat.get("average", "")).startswith("last:"):
            flat["average"] = _AVERAGE
        if kind in RUNS:
            flat["batch_size"] = _rows(runs[name], devices)
            if is_sampled and _refuses_long_pairs(name, flat, whole):
                flat["objective"] = [*_listed(flat.get("objective", [])), f"{_TOO_LONG}={CUT}"]
            if "vocabulary" in whole:  # its size was compared with the model's
                flat.pop("model.vocab_size", None)
            flat = _run(kind, flat, runs[name], scratch / f"{name}_starts_from")
        found[name] = flat
    return found


def _refuses_long_pairs(name: str, flat: Mapping[str, Any], whole: recipes.Tables) -> bool:
    """Returns whether a run refuses pairs that are longer than its lengths."""
    of_cache = whole.get(f"cache.{name.partition('.')[2]}", {})
    task = as_text(flat.get("task", of_cache.get("task", "")))
    own = registry.find(task, flat.get("task_module")) or registry.find(f"mine_{task}")
    settings = (as_text(each).partition("=")[0] for each in _listed(flat.get("objective", [])))
    return own is not None and hasattr(own.objective, _TOO_LONG) and _TOO_LONG not in settings


def _has_model(name: str, whole: recipes.Tables) -> bool:
    """Returns whether a model of the recipe flows to a stage that reads one."""
    return bool({"pretrain", f"finetune.{name.partition('.')[2]}"} & whole.keys())


def check_places(recipe: recipes.Recipe, scratch: str) -> None:
    """Raises UserError if a stage of a rehearsal would write outside its folder."""
    for stage in recipe.stages:
        places = [text for name in _PLACES for text in stage.flags.get(name, ())]
        for place in (stage.output, *places):
            if os.path.commonpath([scratch, os.path.abspath(place)]) != scratch:
                raise UserError(f"[{stage.name}] a rehearsal would write to {place}: leave it out")


def _flags(kind: str, table: Mapping[str, Any]) -> dict[str, Flag]:
    """Returns the flags that a table's keys may be, by all of their names."""
    if kind not in derived_flags.KINDS:
        return {}
    words = COMMANDS[table.get(derived_flags.COMMAND, derived_flags.KINDS[kind].command)]
    return {name: flag for flag in flags_of(command(words).flags) for name in flag.names}


def _spelled(key: str, known: Mapping[str, Flag]) -> str:
    """Returns a key as the name of its flag, if it is one."""
    plain = key.replace("-", "_")
    return known[plain].name if plain in known else key


def _window(real: Config | None) -> int:
    return (real.lengths.inputs or 0) + (real.lengths.targets or 0) if real else 0


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _lists(name: str, given: Any) -> dict[str, str]:
    """Returns the key exclude with the lists of ids; lists of `dedup` know other files."""
    paths = as_text(given).split(",")
    for path in paths:
        if "{" not in path and not files.exists(path):
            raise UserError(f"[{name}] --exclude={path}: no such file")
    kept = [path for path in paths if "{" in path or not path.endswith(".arrow")]
    return {"exclude": ",".join(kept)} if kept else {}


def _rows(real: Config | None, devices: int) -> int:
    """Returns the rows of a small run's batch, which the devices can share."""
    lengths = _window(real)
    rows = min(_MOST, _POSITIONS // lengths) if lengths else _MOST
    if real and from_transformers.is_folder(real.init_from or ""):  # it keeps its vocabulary
        rows //= 1 + real.model.vocab_size // _LARGE
    return math.ceil(max(rows, _LEAST) / devices) * devices


def _run(
    kind: str, flat: dict[str, Any], real: Config | None, place: pathlib.Path
) -> dict[str, Any]:
    """Returns the keys of a short run of a small model."""
    every = real.evaluation.every_steps if real else flat.get(_EVALUATIONS)
    flat |= _RUN
    if as_text(every) == "0":
        flat[_EVALUATIONS] = 0
    if "gin_file" in flat:
        flat |= _OF_GIN
    source = as_text(flat.get(_START, ""))
    own = kind == "pretrain" or from_transformers.is_folder(source)
    if real is None or "{" in source or not own:  # the model of another stage, or elsewhere
        return flat
    if from_transformers.is_folder(source):
        folder(source.removeprefix(from_transformers.PREFIX), place)
        kept = {key: value for key, value in flat.items() if key.partition(".")[2] not in _SMALL}
        return {**kept, _START: f"{from_transformers.PREFIX}{place}"}
    if source:  # its parameters were compared with the model's
        flat = {key: value for key, value in flat.items() if not key.startswith(_START)}
    sizes = {f"model.{name}": value for name, value in small_model(real.model).items()}
    return {**flat, **sizes}


def small_model(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields that make a model small."""
    values = {name: min(getattr(model, name) or 0, most) for name, most in _SMALL.items()}
    if getattr(model.part("mixer").options, "conditional_heads", None):
        values["num_heads"] = model.num_heads  # the part names a share of them
    if model.num_kv_heads:
        values["num_kv_heads"] = math.gcd(model.num_kv_heads, values["num_heads"])
    return {name: value for name, value in values.items() if value}


def folder(source: str, target: pathlib.Path) -> None:
    """Writes a transformers folder with a small random model of the same kind as another's.

    Its tokenizer, ids and all other settings are the other's.
    """
    import numpy as np

    from trainer import huggingface
    from trainer.huggingface import names, special_ids, weights
    from trainer.huggingface.formats import KINDS
    from trainer.model.spec import model_spec
    from trainer.model.transformer import parameter_facts

    theirs = pathlib.Path(files.local_path(source))
    model = huggingface.model_config(source)
    if not weights.places(str(theirs)):
        weights.read(str(theirs))  # says what is missing
    small = replace(model, **small_model(model), scan_layers=False)
    written = files.read_json(str(theirs / huggingface.CONFIG))
    kind = KINDS[written["model_type"]]
    before, after = kind.write(model, 1), kind.write(small, 1)
    changed = {name: value for name, value in after.items() if value != before[name]}
    target.mkdir()
    for path in theirs.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copy(path, target)
    files.write_json(str(target / huggingface.CONFIG), {**written, **changed})
    random, tree = np.random.default_rng(0), dict[str, Any]()
    for path_of, facts in parameter_facts(model_spec(small)).items():
        *outer, last = path_of.split("/")
        inner = tree
        for each in outer:
            inner = inner.setdefault(each, {})
        noise = random.standard_normal(facts.shape, np.float32) / 16
        inner[last] = noise + 1 if last == "scale" else noise
    pad = special_ids.pad(written)
    tensors = names.to_tensors(tree, small, written["model_type"], pad)
    weights.write(str(target), tensors, shard_bytes=5 * 10**9)
