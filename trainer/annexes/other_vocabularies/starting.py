"""Starts runs from parameters of another vocabulary.

Every tensor with a "vocab" axis gets new rows along it, each the mean of one or more old rows
(`rows`); so do its moments if the optimizer state is loaded.
"""

from dataclasses import replace
from typing import Any, Literal

from tasks import vocabulary
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds
from trainer import huggingface
from trainer.annexes.other_vocabularies import rows as vocabulary_rows
from trainer.annexes.other_vocabularies import tensors
from trainer.annexes.other_vocabularies.options import OldVocabularyConfig
from trainer.annexes.other_vocabularies.rows import Rows
from trainer.checkpoints.layout import Parts
from trainer.checkpoints.stored import Checkpoint, load
from trainer.config import Config, from_transformers
from trainer.data.run import Run
from trainer.huggingface import special_ids
from trainer.initialization import vocabularies

ID_MAP = "id_map.json"


def renewed(
    run: Run, checkpoint: Checkpoint | None, found: dict[str, Parts], old_rows: int
) -> vocabularies.Fitted:
    """Returns what `config.init_from` has with rows for the run's vocabulary.

    `found` are its parameters, with tables of `old_rows`; `checkpoint` is None for a folder of
    transformers. Raises a UserError if an option names an unusable vocabulary, or if the old one
    differs and cannot be found.
    """
    config, flag = run.config, f"--init_from={run.config.init_from}"
    rows, is_known = _rows_for(config, run.data, checkpoint, old_rows)
    if rows is None:
        return vocabularies.Fitted(found, checkpoint, is_known)
    shapes = {name: parts["value"].shape for name, parts in found.items()}
    axes = tensors.vocabulary_axes(config.model)
    found = tensors.changed(flag, found, axes, rows)
    if checkpoint:
        state = tensors.changed_state(checkpoint.state, shapes, axes, rows)
        checkpoint = replace(checkpoint, state=state)
    else:
        _check_start(run, rows)
    return vocabularies.Fitted(found, checkpoint, is_known, str(rows))


def _check_start(run: Run, rows: Rows) -> None:
    """Raises a UserError if a folder's decoder begins with an id whose row is not the run's."""
    folder = str(run.config.init_from).removeprefix(from_transformers.PREFIX)
    model, start = huggingface.model_config(folder), run.converter.special.start
    # The start's row follows the row of the vocabulary's own start.
    if model.start_id and [model.start_id] != [n for n in rows.sources[start] if n >= 0]:
        raise UserError(
            f"--init_from={run.config.init_from}: {special_ids.START} is {model.start_id}, which "
            "is not the first id of its vocabulary, and the run has another vocabulary: set "
            "--model.start_id to the id that has its row"
        )


def _rows_for(
    config: Config, data: Any, checkpoint: Checkpoint | None, old_rows: int
) -> tuple[Rows | None, bool]:
    """Returns how the rows of `config.init_from` become rows of the run's vocabulary.

    `checkpoint` is the one that init_from names, None for a transformers folder; `old_rows` is the
    size of its table. Returns (rows, whether the old vocabulary is known); rows are None if they
    stay unchanged: the vocabulary is the same, or the old one is unknown. Raises a UserError if an
    option names an unusable vocabulary, or if the checkpoint's differs and cannot be found.
    """
    given, flag = _settings(config), f"--init_from={config.init_from}"
    own, new_rows = vocabularies.own_vocabulary(data), config.model.vocab_size
    if own is None:
        if given.path or given.id_map:
            raise UserError(
                "--init_from_vocabulary has no effect: the pieces of this run's own vocabulary are "
                "unknown because its task does not read a cache of pipeline.build"
            )
        return None, vocabularies.is_known(checkpoint)
    if given.id_map:
        return _by_map(given.id_map, own, old_rows, new_rows), True
    found_ids = _known(config, checkpoint, own)
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
    source, given = config.init_from or "", _settings(config)
    if own is None:
        return False
    if given.id_map or given.path:
        return True
    checkpoint = None if source.startswith(from_transformers.PREFIX) else load(source)
    ids = _known(config, checkpoint, own)
    if not isinstance(ids, TokenIds) or ids == own:
        return False
    most = max(ids.size, own.size)
    try:
        return not vocabulary_rows.by_piece(ids, own, most, most).begins_equal
    except UserError:  # reported when the rows are made
        return False


def _settings(config: Config) -> OldVocabularyConfig:
    found: OldVocabularyConfig = config.init_from_vocabulary  # type: ignore[attr-defined]
    return found


def _known(
    config: Config, checkpoint: Checkpoint | None, own: TokenIds
) -> TokenIds | Literal["same"] | None:
    given = _settings(config)
    if given.path:
        return vocabulary.load(given.path, given.extra_ids or 0).ids
    return vocabularies.known(config.init_from or "", checkpoint, config.model, own)


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
