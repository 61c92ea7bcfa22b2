"""The rules by which a rehearsal shrinks a recipe: its tables, models and transformers folders."""

import math
import pathlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from palimpsest.recipes import recipe as recipes
from palimpsest.rehearsals.samples import Samples
from tasks import registry
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import Config, from_transformers
from trainer.model.config import ModelConfig

UPDATES = 20
_PIECES = 1000
# Where the real stages run and write, and what only a long or distributed run needs.
_DROPPED = {
    "dedup": ("output", "runner", "workers", "part"),
    "vocabulary": ("output", "runner", "workers"),
    "cache": ("cache_dir", "runner", "workers", "part", "hf_token_secret", "shard_bytes"),
    "pretrain": ("cache_dir", "model_dir", "profile_steps", "tokens_per_batch", "microbatches"),
    "finetune": ("cache_dir", "model_dir", "profile_steps", "tokens_per_batch", "microbatches"),
    "evaluate": ("model_dir", "output", "cache_dir", "plot", "steps"),
    "report": ("model_dir", "output", "picture"),
    "export": ("model_dir", "output", "push_to"),
}
_DROPPED_GROUPS = ("mesh.", "processes.")
_RUN: Mapping[str, Any] = {
    "train_steps": UPDATES,
    "metrics.every_steps": UPDATES // 4,
    "checkpoint.every_steps": UPDATES // 2,
    "evaluation.every_steps": UPDATES // 2,
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
    "num_experts": 4,
}
_START = "init_from"
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
    sampled, flowing = Samples(scratch), any(name.startswith("corpus.") for name in whole)
    found = {}
    for name, table in whole.items():
        kind = name.partition(".")[0]
        left_out = _DROPPED.get(kind, ())
        # A runner has flags of its own, such as Dataflow's project.
        own = recipes.names_of(kind) if "runner" in table else table.keys()
        flat = {
            key: value
            for key, value in table.items()
            if key not in left_out and key in own and not key.startswith(_DROPPED_GROUPS)
        }
        if "corpus" in flat or kind == "corpus":
            flat |= sampled.of(name, flat.get("corpus", ""), flat.pop("languages", None))
        elif kind == "cache" and not flowing:
            spec = registry.get(str(flat.get("task")), flat.get("task_module")).corpus
            flat |= sampled.of(name, spec, None)
        if kind == "dedup" and "against" in flat:
            flat["against"] = [
                sampled.of(name, each, None)["corpus"] for each in _listed(flat["against"])
            ]
        if kind in ("dedup", "cache") and "exclude" in flat:
            flat |= _lists(name, flat.pop("exclude"))
        if kind == "vocabulary":
            flat["vocab_size"] = min(int(flat.get("vocab_size", _PIECES)), _PIECES)
        if kind in ("pretrain", "finetune"):
            flat["batch_size"] = _rows(runs[name], devices)
            flat = _run(kind, flat, runs[name], scratch / f"{name}_starts_from")
        found[name] = flat
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _lists(name: str, given: Any) -> dict[str, str]:
    """Returns the key exclude with the lists of ids; lists of `dedup` know other files."""
    paths = [path for each in _listed(given) for path in str(each).split(",")]
    for path in paths:
        if "{" not in path and not files.exists(path):
            raise UserError(f"[{name}] --exclude={path}: no such file")
    kept = [path for path in paths if "{" in path or not path.endswith(".arrow")]
    return {"exclude": ",".join(kept)} if kept else {}


def _rows(real: Config | None, devices: int) -> int:
    """Returns the rows of a small run's batch, which the devices can share."""
    lengths = real and (real.lengths.inputs or 0) + (real.lengths.targets or 0)
    rows = min(_MOST, _POSITIONS // lengths) if lengths else _MOST
    if real and from_transformers.is_folder(real.init_from or ""):  # it keeps its vocabulary
        rows //= 1 + real.model.vocab_size // _LARGE
    return math.ceil(max(rows, _LEAST) / devices) * devices


def _run(
    kind: str, flat: dict[str, Any], real: Config | None, place: pathlib.Path
) -> dict[str, Any]:
    """Returns the keys of a short run of a small model."""
    flat |= _RUN
    if "gin_file" in flat:
        flat |= _OF_GIN
    source = str(flat.get(_START, ""))
    own = kind == "pretrain" or from_transformers.is_folder(source)
    if real is None or "{" in source or not own:  # the model of another stage, or elsewhere
        return flat
    flat.pop("model.vocab_size", None)
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
    from trainer.huggingface import names, weights
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
        noise = random.standard_normal(facts.shape, np.float32) / 8
        inner[last] = noise + 1 if last == "scale" else noise
    tensors = names.to_tensors(tree, small, written["model_type"])
    weights.write(str(target), tensors, shard_bytes=5 * 10**9)
