"""Loads parameters trained with a different vocabulary: `--init_from`.

Every tensor with a "vocab" axis gets new rows along it, each the mean of one or more old rows
(`tasks.vocabulary_changes.rows`); so do its moments if the optimizer state is loaded.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tasks import vocabulary
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds, Vocabulary
from tasks.vocabulary_changes import rows as vocabulary_rows
from tasks.vocabulary_changes.rows import NONE, Rows
from trainer.checkpoints import layout
from trainer.checkpoints.layout import Parts
from trainer.checkpoints.stored import Checkpoint, load
from trainer.checkpoints.tensors import Index, Tensor
from trainer.config import Config, from_transformers, stored_config
from trainer.data import cached_task
from trainer.data.mixing import mixtures_of
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

_AXIS = "vocab"
# The key under which our checkpoints record the checksum of their vocabulary.
_RECORDED = "vocabulary_sha256"
ID_MAP = "id_map.json"
# Number of new rows to make at a time.
_BLOCK = 4096
# T5's sentinels beyond the pieces of its SentencePiece model, unless its folder says otherwise.
_T5_SENTINELS = 100
_T5_FAMILIES = ("t5_1_0", "t5_1_1")
# Adafactor's leaves that are averages over one axis of a matrix.
_FACTORS = ("v_row", "v_col")
_FACTOR = re.compile(r"(.*?)(v_row|v_col)/(.+)")


def vocabulary_axes(model: ModelConfig) -> dict[str, int]:
    """Returns the vocabulary axis of each parameter that has one."""
    facts = parameter_facts(model_spec(replace(model, scan_layers=False)))
    named = {path: tuple(each.axes) for path, each in facts.items()}
    return {path: axes.index(_AXIS) for path, axes in named.items() if _AXIS in axes}


def rows_for(
    config: Config, data: Any, checkpoint: Checkpoint | None, old_rows: int
) -> tuple[Rows | None, bool]:
    """Returns how the rows of `config.init_from` become rows of the run's vocabulary.

    `checkpoint` is the one that init_from names, None for a transformers folder; `old_rows` is the
    size of its table. Returns (rows, whether the old vocabulary is known); rows are None if they
    stay unchanged: the vocabulary is the same, or the old one is unknown. Raises a UserError if an
    option names an unusable vocabulary, or if the checkpoint's differs and cannot be found.
    """
    given, flag = config.init_from_vocabulary, f"--init_from={config.init_from}"
    own, new_rows = own_vocabulary(data), config.model.vocab_size
    if own is None:
        if given.path or given.id_map:
            raise UserError(
                "--init_from_vocabulary has no effect: the pieces of this run's own vocabulary are "
                "unknown because its task does not read a cache of pipeline.build"
            )
        return None, bool(checkpoint and checkpoint.run and checkpoint.run.get(_RECORDED))
    if given.id_map:
        return _by_map(given.id_map, own, old_rows, new_rows), True
    found_ids = known(config, checkpoint, own)
    if found_ids == own and old_rows == new_rows:
        return None, True
    if not isinstance(found_ids, TokenIds):
        return None, found_ids is not None
    try:
        found = vocabulary_rows.by_piece(found_ids, own, old_rows, new_rows)
    except UserError as error:
        raise UserError(
            f"{flag}: {error}; use --init_from_vocabulary.path to name the "
            "vocabulary it was trained with, or --init_from_vocabulary.id_map for an id_map.json"
        ) from error
    return (None if found.unchanged else found), True


def has_other_rows(config: Config, own: TokenIds | None) -> bool:
    """Returns whether `own` is known to differ from the vocabulary of `config.init_from`."""
    source, given = config.init_from or "", config.init_from_vocabulary
    if own is None:
        return False
    if given.id_map or given.path:
        return True
    checkpoint = None if source.startswith(from_transformers.PREFIX) else load(source)
    ids = known(config, checkpoint, own)
    if not isinstance(ids, TokenIds) or ids == own:
        return False
    most = max(ids.size, own.size)
    try:
        return not vocabulary_rows.by_piece(ids, own, most, most).begins_equal
    except UserError:  # reported when the rows are made
        return False


def _by_map(path: str, own: TokenIds, old_rows: int, new_rows: int) -> Rows:
    place = path if path.endswith(".json") else files.join(path, ID_MAP)
    try:
        id_map = files.read_json(place)
    except (OSError, ValueError) as error:
        raise UserError(f"--init_from_vocabulary.id_map={path}: no JSON file at {place}") from error
    if not isinstance(id_map, list):
        raise UserError(f"{place} is not an id_map.json of a vocabulary (not a list)")
    try:
        return vocabulary_rows.by_map(id_map, own, old_rows, new_rows)
    except UserError as error:
        raise UserError(f"--init_from_vocabulary.id_map={path}: {error}") from error


def known(
    config: Config, checkpoint: Checkpoint | None, own: TokenIds
) -> TokenIds | Literal["same"] | None:
    """Returns the vocabulary with which the parameters of `config.init_from` were trained.

    Without an option, it is read from a run's cache, from a file beside its checkpoints, or from a
    transformers folder; other checkpoints have none. "same" means that a checkpoint records `own`,
    but its ids were not found; None means unknown. Raises a UserError if a checkpoint records
    a different vocabulary that cannot be found.
    """
    given, source = config.init_from_vocabulary, config.init_from or ""
    if given.path:
        return vocabulary.load(given.path, given.extra_ids or 0).ids
    if source.startswith(from_transformers.PREFIX):
        loaded = of_folder(source.removeprefix(from_transformers.PREFIX), config.model)
        return loaded.ids if loaded else None
    stored = checkpoint.run.get(_RECORDED) if checkpoint and checkpoint.run else None
    if not checkpoint or not stored:
        return None
    found, problem = of_run(checkpoint)
    if found is None and stored != hashlib.sha256(own.model).hexdigest():
        raise UserError(
            f"--init_from={source} was trained with a different vocabulary from this run's, and "
            f"{problem}: name it with --init_from_vocabulary.path"
        )
    return found.ids if found else "same"


def of_run(checkpoint: Checkpoint) -> tuple[Vocabulary | None, str]:
    """Returns the vocabulary of a run's checkpoint or cache, or None and the reason."""
    assert checkpoint.run is not None
    sha256 = checkpoint.run.get(_RECORDED)
    folder = checkpoint.path.rstrip("/").rpartition("/")[0]
    try:
        config = stored_config(checkpoint.run["config"], checkpoint.path)
        for name in vocabulary.VOCABULARY_FILES:
            if files.exists(path := files.join(folder, name)):
                loaded = vocabulary.load(path, config.vocabulary.extra_ids or 0)
                if loaded.record.sha256 == sha256:
                    return loaded, ""
        if not config.task or not config.cache_dir:
            return None, "it has no vocabulary beside it"
        name = next(name for _, spec in mixtures_of(config) for name in spec.names)
        loaded = cached_task.opened(config, name).vocabulary
    except (UserError, KeyError) as error:
        return None, f"its own vocabulary was not found ({error})"
    same = loaded.record.sha256 == sha256
    return (loaded, "") if same else (None, f"the cache of {config.task} has a third vocabulary")


def of_folder(folder: str, model: ModelConfig) -> Vocabulary | None:
    """Returns the vocabulary in a transformers folder, with T5's sentinels, or None."""
    names = ("spiece.model", "tokenizer.model", *vocabulary.VOCABULARY_FILES)
    if not any(files.exists(files.join(folder, name)) for name in names):
        return None
    try:
        loaded = vocabulary.load(folder)
        if loaded.is_sentencepiece and not loaded.record.sentinels:
            loaded = vocabulary.load(folder, sentinels_of(folder, model))
    except UserError:
        return None
    return loaded


def check_same(folder: str, other: str, model: ModelConfig) -> None:
    """Raises UserError if two transformers folders are known to have different vocabularies."""
    one, two = of_folder(folder, model), of_folder(other, model)
    if one is not None and two is not None and one.ids != two.ids:
        raise UserError(f"{folder} and {other} have different vocabularies: use decoders of one")


def sentinels_of(folder: str, model: ModelConfig) -> int:
    """Returns how many sentinels a transformers folder adds to its SentencePiece model."""
    config: dict[str, Any] = {}
    if files.exists(path := files.join(folder, "tokenizer_config.json")):
        config = files.read_json(path)
    if isinstance(found := config.get("extra_ids"), int):
        return found
    others = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    names = [str(each.get("content") if isinstance(each, dict) else each) for each in others]
    if count := sum(name.startswith("<extra_id_") for name in names):
        return count
    return _T5_SENTINELS if model.family in _T5_FAMILIES and not names else 0


def own_vocabulary(data: Any) -> TokenIds | None:
    """Returns the vocabulary of a run's data; None for seqio tasks, which do not expose it."""
    ids = data.tasks[0].ids if data.tasks else None
    return ids if ids and ids.model else None


def changed(
    flag: str, found: Mapping[str, Parts], axes: Mapping[str, int], rows: Rows
) -> dict[str, Parts]:
    """Returns parameters and their moments with `rows` along their vocabulary axes.

    `found` has unstacked layers; `axes` is the result of `vocabulary_axes`. Raises a UserError,
    with `flag`, if a parameter's row count differs from the embedding table's.
    """
    out = dict(found)
    for name, axis in axes.items():
        if name not in found:
            continue  # reported with the other names
        value = found[name]["value"]
        if len(value.shape) <= axis or value.shape[axis] != rows.old_rows:
            raise UserError(
                f"{flag}: {name} has shape {value.shape}, which does not fit a table of "
                f"{rows.old_rows:,} rows"
            )
        out[name] = {
            part: _changed_part(part, tensor, axis, found[name], rows)
            for part, tensor in found[name].items()
        }
    return out


def _changed_part(part: str, tensor: Tensor, axis: int, parts: Parts, rows: Rows) -> Tensor:
    if not part.startswith("over"):
        return along(tensor, axis, rows)
    over = int(part[-1])
    if over != axis:
        return along(tensor, 0, rows)
    return _rescaled(tensor, parts[f"over {1 - axis}"], rows)


def changed_state(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    axes: Mapping[str, int],
    rows: Rows,
) -> dict[str, Tensor]:
    """Returns the leaves of our optimizer's state with `rows` along their vocabulary axes.

    Moments of a parameter's shape change like the parameter. Adafactor's factors are averages over
    one axis: the factor along the vocabulary changes likewise; the other is scaled to preserve the
    second moments of carried rows. `shapes` are the parameters' old shapes.
    """
    out = dict(state)
    for name, tensor in state.items():
        parameter = next((each for each in axes if name.endswith(f"/{each}")), None)
        if parameter is None or tensor.shape == (1,):
            continue
        axis, old, factor = axes[parameter], shapes[parameter], _FACTOR.fullmatch(name)
        if tensor.shape == old and not factor:
            out[name] = along(tensor, axis, rows)
            continue
        before = layout.by_size(old)
        after = layout.by_size((*old[:axis], len(rows.sources), *old[axis + 1 :]))
        if factor and before and after:
            # A row is averaged over the longer axis, which may be the other one now.
            over = before[_FACTORS.index(factor[2])]
            leaf = {kind: f"{factor[1]}{kind}/{factor[3]}" for kind in _FACTORS}
            along_rows = state[leaf[_FACTORS[before.index(1 - axis)]]]
            made = _rescaled(tensor, along_rows, rows) if over == axis else along(tensor, 0, rows)
            out[leaf[_FACTORS[after.index(over)]]] = made
    return out


def _rescaled(factor: Tensor, of_rows: Tensor, rows: Rows) -> Tensor:
    """Rescales Adafactor's average over the vocabulary to match the factor of the new rows.

    A second moment is row * column / mean(row); scaling the column by the change in the mean
    preserves it.
    """

    def read(index: Index) -> np.ndarray:
        old = of_rows.whole().astype(np.float64)
        new = along(of_rows, 0, rows).whole().astype(np.float64)
        ratio = new.mean() / old.mean() if old.any() else 1.0
        return (factor.read(index) * ratio).astype(factor.dtype)

    return Tensor(factor.shape, factor.dtype, read)


def along(tensor: Tensor, axis: int, rows: Rows) -> Tensor:
    """Returns a tensor with new rows along an axis; a row with a single source is an exact copy.

    Sums are float64 and in row order, so that a slice equals that part of the tensor bit for bit.
    """
    kept: dict[str, Any] = {}

    def old(index: Index) -> tuple[np.ndarray, np.ndarray]:
        """Returns old rows [rows, rest], and the mean row over all ids [rest]."""
        rest = str((index[:axis], index[axis + 1 :]))
        if kept.get("rest") != rest:  # devices that divide the axis read the same part in turn
            every = (*index[:axis], slice(None), *index[axis + 1 :])
            table = np.moveaxis(np.asarray(tensor.read(every)), axis, 0)
            total = np.zeros(table.shape[1:], np.float64)
            for row in table[: rows.old_ids]:
                total += row
            kept.update(rest=rest, table=table, mean=total / rows.old_ids)
        return kept["table"], kept["mean"]

    def read(index: Index) -> np.ndarray:
        table, mean = old(index)
        wanted = rows.sources[index[axis]]
        out = np.empty((len(wanted), *table.shape[1:]), tensor.dtype)
        for start in range(0, len(wanted), _BLOCK):
            block = wanted[start : start + _BLOCK]
            out[start : start + _BLOCK] = _means(table, mean, block)
        return np.moveaxis(out, 0, axis)

    shape = (*tensor.shape[:axis], len(rows.sources), *tensor.shape[axis + 1 :])
    return Tensor(shape, tensor.dtype, read)


def _means(table: np.ndarray, mean: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Returns the mean of the rows in each line of `sources`, float64; `mean` for empty lines."""
    counts = (sources != NONE).sum(1)
    tail = (1,) * (table.ndim - 1)
    total = np.zeros((len(sources), *table.shape[1:]), np.float64)
    for column in sources.T[: counts.max(initial=0)]:
        present = column != NONE
        total[present] += table[column[present]]
    return np.where(
        counts.reshape(-1, *tail) > 0, total / np.maximum(counts, 1).reshape(-1, *tail), mean
    )
