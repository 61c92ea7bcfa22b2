"""Rehearses a recipe: all of its stages on a sample, with a small model, in a temporary folder.

A corpus becomes its first documents, a vocabulary gets at most 1,000 pieces, and a model two layers
of width 64. Lengths, objectives, optimizers, metrics and exports stay. A run stops after half of
its 20 updates and is resumed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from palimpsest.recipes import recipe as recipes
from palimpsest.recipes.recipe import Recipe
from palimpsest.recipes.running import told
from tasks import registry
from tasks.reading import languages, sources
from tasks.storage import files
from tasks.terminal import toml_flags
from tasks.terminal.command_line import UserError
from tasks.unit import Unit

DOCUMENTS = 400
_UPDATES = 20
_PIECES = 1000
_OF_SAMPLE = "?validation=0.1"
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
_RUN = {
    "train_steps": _UPDATES,
    "batch_size": 8,
    "metrics.every_steps": _UPDATES // 4,
    "checkpoint.every_steps": _UPDATES // 2,
    "evaluation.every_steps": _UPDATES // 2,
}
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


def rehearse(path: str, folder: str | None) -> int:
    """Rehearses a recipe; raises UserError with the first stage's line that fails."""
    recipe = recipes.read(path, folder)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as scratch:
        for place in dict.fromkeys(_places(recipe)):
            _check_writable(place)
        with _timed("sampled the corpora"):
            tables = _small(recipes.tables_of(recipe.path)[1], pathlib.Path(scratch))
        small = recipes.of_tables(recipe.path, tables, files.join(scratch, "run"))
        for stage in small.stages:
            if stage.kind in ("pretrain", "finetune"):
                half = {**stage.flags, "train_steps": (str(_UPDATES // 2),)}
                with _timed(f"{stage.name}: {_UPDATES // 2} updates"):
                    told(stage, dataclasses.replace(stage, flags=half).line)
            with _timed(stage.name):
                told(stage, stage.line)
    print(f"rehearsed {recipe.path} in {time.monotonic() - begin:.0f} s")
    return 0


def _places(recipe: Recipe) -> Iterator[str]:
    """Yields the folders in which the recipe's stages make theirs."""
    yield recipe.folder
    for stage in recipe.stages:
        if not stage.output.startswith(f"{recipe.folder}/"):
            yield stage.output.rpartition("/")[0] or "."


def _check_writable(folder: str) -> None:
    """Raises UserError if no file can be written in a folder, which need not exist."""
    path = files.join(folder, f".rehearsal-{uuid.uuid4().hex}")
    made: list[str] = []  # the folders that this makes, the innermost first
    inner = "" if files.is_remote(folder) else os.path.abspath(files.local_path(folder))
    while inner and not os.path.exists(inner):
        made.append(inner)
        inner = os.path.dirname(inner)
    try:
        files.make_folder(folder)
        files.write_bytes(path, b"")
        files.remove(path)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror or error}): choose another --folder"
        ) from error
    for each in made:
        with contextlib.suppress(OSError):
            os.rmdir(each)


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)


def _small(tables: recipes.Tables, scratch: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the tables of a recipe for its rehearsal; writes the samples of its corpora."""
    sampled, flowing = _Samples(scratch), any(name.startswith("corpus.") for name in tables)
    found = {}
    for name, table in tables.items():
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
            flat["against"] = sampled.of(name, flat["against"], None)["corpus"]
        if kind == "vocabulary":
            flat["vocab_size"] = min(int(flat.get("vocab_size", _PIECES)), _PIECES)
        if kind == "pretrain":
            flat = {**flat, **_RUN, **_small_model(flat)}
            flat.pop("model.vocab_size", None)
        if kind == "finetune":
            flat |= _RUN
        found[name] = flat
    return found


def _small_model(flat: Mapping[str, Any]) -> dict[str, int]:
    """Returns the fields that make the model of a run small."""
    from trainer.config.from_flags import build_config

    preset = flat.get("preset")
    if preset is None:  # gin files, or a folder of transformers, give the model
        return {}
    typed = [f"--{k}={toml_flags.as_text(v)}" for k, v in flat.items() if k.startswith("model.")]
    model = build_config(preset, typed)[0].model
    values = {name: min(getattr(model, name) or 0, most) for name, most in _SMALL.items()}
    return {f"model.{name}": value for name, value in values.items() if value}


class _Samples:
    """The first documents of corpora, written once as JSON lines."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._known: dict[str, str] = {}

    def of(self, where: str, texts: Any, names: Any) -> dict[str, Any]:
        """Returns the key corpus of a table with samples in the place of its corpora."""
        given = [texts] if isinstance(texts, str) else list(texts)
        try:
            joined = ",".join(names) if isinstance(names, list) else names
            specs = languages.specs(given, joined)
            found = {name: self._sample(spec) for name, spec in specs.items()}
        except UserError as error:
            raise UserError(f"[{where}] {error}") from error
        if list(found) == [""]:
            return {"corpus": found[""]}
        return {"corpus": [f"{name}={spec}" for name, spec in found.items()]}

    def _sample(self, spec: Any) -> str:
        if str(spec) not in self._known:
            path = self._folder / f"sample-{len(self._known)}.jsonl"
            columns = spec.unit.columns
            with path.open("w", encoding="utf-8") as file:
                for row in _rows(spec):
                    kept = {name: row[name] for name in ("id", *columns)}
                    file.write(json.dumps(kept, ensure_ascii=False) + "\n")
            options = f"{_OF_SAMPLE}&id=id"
            if spec.unit is Unit.PAIR:
                options += "&inputs=inputs&targets=targets"
            self._known[str(spec)] = f"json:{path}{options}"
        return self._known[str(spec)]


def _rows(spec: Any) -> Iterator[dict[str, Any]]:
    """Yields the first usable documents of a corpus; raises UserError if there is none."""
    left, problems = DOCUMENTS, set[str]()
    corpus = sources.resolve(spec)
    for piece in corpus.pieces:
        for _, batch in sources.read(corpus, piece):
            for row in batch.to_pylist():
                if row["problem"]:
                    problems.add(row["problem"])
                    continue
                yield row
                left -= 1
                if not left:
                    return
    if left == DOCUMENTS:
        why = f": {', '.join(sorted(problems))}" if problems else ""
        raise UserError(f"--corpus={spec} has no usable document{why}")
