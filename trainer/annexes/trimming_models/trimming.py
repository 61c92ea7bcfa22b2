"""Trims models to the pieces that a corpus needs."""

import dataclasses
from typing import Any

import numpy as np

from tasks import vocabulary
from tasks.annexes.trimming import pieces, usage
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary
from trainer.annexes.conversion import targets, verify
from trainer.annexes.conversion.sources import Opened
from trainer.annexes.conversion.targets import Settings
from trainer.annexes.other_vocabularies import rows, tensors
from trainer.huggingface.tokenizer import TOKENIZER_CONFIG, Roles
from trainer.initialization import vocabularies

# Embedding tables have a multiple of this many rows, as in training.
_MULTIPLE = 128


def vocabulary_of(opened: Opened, path: str | None, extra_ids: int | None) -> Vocabulary:
    """Returns the vocabulary at `path` or, if that is None, the opened checkpoint's."""
    flag, source = f"--from={opened.source.path}", opened.source
    problem = "such a checkpoint does not record it"
    found: Vocabulary | None = None
    if path:
        found = vocabulary.load(path, extra_ids or 0)
    elif source.transformers:
        found = vocabularies.of_folder(source.path, opened.model.config)
        problem = "there is no readable tokenizer in the folder"
    elif opened.checkpoint and opened.checkpoint.run:
        found, problem = vocabularies.of_run(opened.checkpoint)
    if found is None:
        raise UserError(f"{flag}: its vocabulary is unknown because {problem}; pass --vocabulary")
    if found.size > opened.model.config.vocab_size:
        raise UserError(
            f"{flag} has {opened.model.config.vocab_size:,} rows, but the vocabulary {found.name} "
            f"{found.size:,} ids: use --vocabulary to name the one that it was trained with"
        )
    return found


def trimmed(opened: Opened, id_map: list[int | None], left: Vocabulary) -> Opened:
    """Returns a checkpoint with only the rows of `left`, padded to a multiple of 128.

    `id_map` has the new id for each id of its vocabulary; None for removed pieces.
    """
    model, flag = opened.model.config, f"--from={opened.source.path}"
    size = -(-left.size // _MULTIPLE) * _MULTIPLE
    made = rows.by_map(id_map, left.ids, model.vocab_size, size)
    axes = tensors.vocabulary_axes(model)
    shapes = {name: parts["value"].shape for name, parts in opened.parameters.items()}
    checkpoint = opened.checkpoint
    if checkpoint:
        state = tensors.changed_state(checkpoint.state, shapes, axes, made)
        run = checkpoint.run and {**checkpoint.run, "vocabulary_sha256": left.record.sha256}
        checkpoint = dataclasses.replace(checkpoint, state=state, run=run)
    start = None if model.start_id is None else id_map[model.start_id]
    if start is None and model.start_id is not None:
        raise UserError(
            f"{flag}: its decoder begins with id {model.start_id}, a piece that was trimmed away"
        )
    name = opened.model.name
    if opened.source.transformers:
        written = files.read_json(files.join(opened.source.path, "config.json"))
        name = "mt5" if written["model_type"] == "mt5" else name
    return opened._replace(
        # The model differs from what transformers loads from this folder.
        source=opened.source._replace(transformers=False),
        model=opened.model._replace(
            config=dataclasses.replace(model, vocab_size=size, start_id=start), name=name, ids={}
        ),
        parameters=tensors.changed(flag, opened.parameters, axes, made),
        checkpoint=checkpoint,
    )


def _roles(opened: Opened) -> Any:
    path = files.join(opened.source.path, TOKENIZER_CONFIG)
    model = opened.model.config
    if model.has_decoder or not files.exists(path):
        return None
    written = files.read_json(path)
    names = [written.get(f"{role}_token") or "" for role in ("cls", "mask")]
    begins, mask = (name["content"] if isinstance(name, dict) else name for name in names)
    return Roles(begins=begins, mask=mask, types=model.token_types > 1)


def cut(flags: Any, opened: Opened, settings: Settings) -> tuple[Opened, Settings]:
    """Trims a model and checks its logits; returns the model and its settings."""
    base = vocabulary_of(opened, flags.vocabulary, flags.extra_ids)
    corpus = sources.resolve(sources.parse(flags.corpus))
    for note in corpus.notes:
        print(note)
    counts = usage.count(base, corpus, flags.workers)
    found = pieces.trim(base, counts, flags.min_count, flags.vocab_size)
    print(f"vocabulary: {pieces.described(base, found, counts)}", flush=True)
    made = trimmed(opened, found.id_map, found.vocabulary)
    settings = dataclasses.replace(settings, vocabulary=found.vocabulary, roles=_roles(opened))
    targets.refuse(made, settings)
    old_of_new = np.array([old for old, new in enumerate(found.id_map) if new is not None])
    before = targets.values(opened, "float32")
    after = targets.values(made, "float32")
    difference = verify.kept_logits(
        (opened.model.config, before), (made.model.config, after), old_of_new
    )
    sizes = [sum(array.size for array in arrays.values()) for arrays in (before, after)]
    print(
        f"parameters: {sizes[1]:,} of {sizes[0]:,}; logits of the kept pieces differ from the "
        f"source's by at most {difference:.1e}",
        flush=True,
    )
    return made, settings
