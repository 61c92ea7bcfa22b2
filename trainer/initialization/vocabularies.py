"""The vocabularies with which parameters were trained, and the run's own: `--init_from`."""

import hashlib
from typing import Any, Literal, NamedTuple

from tasks import annexes, vocabulary
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds, Vocabulary
from trainer.checkpoints.layout import Parts
from trainer.checkpoints.stored import Checkpoint
from trainer.config import from_transformers, stored_config
from trainer.data import cached_task
from trainer.data.mixing import mixtures_of
from trainer.data.run import Run
from trainer.model.config import ModelConfig

# The key under which our checkpoints record the checksum of their vocabulary.
RECORDED = "vocabulary_sha256"
# T5's sentinels beyond the pieces of its SentencePiece model, unless its folder says otherwise.
_T5_SENTINELS = 100
_T5_FAMILIES = ("t5_1_0", "t5_1_1")
# What an annex does about another vocabulary: `renewed`, as in `same`, and `has_other_rows`.
SLOT = "starting_vocabularies"


class Fitted(NamedTuple):
    """Parameters and their checkpoint, which fit the run's vocabulary.

    `is_known` is True if the vocabulary that they were trained with is known; `words` say how rows
    were changed, "" if they were not.
    """

    parameters: dict[str, Parts]
    checkpoint: Checkpoint | None
    is_known: bool
    words: str = ""


def is_known(checkpoint: Checkpoint | None) -> bool:
    """Returns whether a checkpoint records its vocabulary."""
    return bool(checkpoint and checkpoint.run and checkpoint.run.get(RECORDED))


def own_vocabulary(data: Any) -> TokenIds | None:
    """Returns the vocabulary of a run's data; None for seqio tasks, which do not expose it."""
    ids = data.tasks[0].ids if data.tasks else None
    return ids if ids and ids.model else None


def same(run: Run, checkpoint: Checkpoint | None, found: dict[str, Parts]) -> Fitted:
    """Returns what was found, unchanged; raises UserError if its vocabulary is known to differ."""
    own, source = own_vocabulary(run.data), str(run.config.init_from)
    if own is None:
        return Fitted(found, checkpoint, is_known(checkpoint))
    theirs = known(source, checkpoint, run.config.model, own)
    if isinstance(theirs, TokenIds) and theirs != own:
        raise UserError(
            f"--init_from={source} was trained with a different vocabulary from this run's"
        )
    return Fitted(found, checkpoint, theirs is not None)


def known(
    source: str, checkpoint: Checkpoint | None, model: ModelConfig, own: TokenIds
) -> TokenIds | Literal["same"] | None:
    """Returns the vocabulary with which the parameters of `source` were trained.

    It is read from the cache of a run's `checkpoint`, from a file beside it, or from a folder of
    transformers with `model`; other checkpoints have none. "same" means that a checkpoint records
    `own`, but its ids were not found; None means unknown. Raises a UserError if a checkpoint
    records a different vocabulary that cannot be found.
    """
    if from_transformers.is_folder(source):
        loaded = of_folder(source.removeprefix(from_transformers.PREFIX), model)
        return loaded.ids if loaded else None
    if not checkpoint or not checkpoint.run or not is_known(checkpoint):
        return None
    found, problem = of_run(checkpoint)
    if found is None and checkpoint.run[RECORDED] != hashlib.sha256(own.model).hexdigest():
        raise UserError(
            f"--init_from={source} was trained with a different vocabulary from this run's, and "
            f"{problem}{annexes.advice('other_vocabulary')}"
        )
    return found.ids if found else "same"


def of_run(checkpoint: Checkpoint) -> tuple[Vocabulary | None, str]:
    """Returns the vocabulary of a run's checkpoint or cache, or None and the reason."""
    assert checkpoint.run is not None
    sha256 = checkpoint.run.get(RECORDED)
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
