"""Cuts a model and its vocabulary to what a corpus needs.

    python -m trainer.trim --from=mt5-small --corpus='parquet:ro/*.parquet' --to=mt5-small-ro

Rows of kept pieces stay, in the embedding and in the logits, as do all other parameters, so the
logits of kept pieces are the source's. The result is checked as by trainer.convert.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import REQUIRED, ReadIf, at_least, field

if TYPE_CHECKING:
    from tasks.vocabulary import Vocabulary
    from trainer.conversion.sources import Opened
    from trainer.conversion.targets import Settings

_FORMATS = ("huggingface", "t5x", "palimpsest")
_EXIT_NOT_EQUAL = 1
# Rows of tables are a multiple of this, as in training.
_MULTIPLE = 128


def vocabulary_of(opened: Opened, path: str | None, extra_ids: int | None) -> Vocabulary:
    """Returns the vocabulary of an opened checkpoint, that at `path` if it is given.

    Raises:
      UserError: there is none, or it has more ids than the model.
    """
    from tasks import vocabulary
    from trainer.starting import vocabulary_change

    flag, source = f"--from={opened.source.path}", opened.source
    problem = "it is not recorded in such a checkpoint"
    found: Vocabulary | None = None
    if path:
        found = vocabulary.load(path, extra_ids or 0)
    elif source.transformers:
        found = vocabulary_change.of_folder(source.path, opened.model.config)
        problem = "there is no tokenizer in the folder that can be read"
    elif opened.checkpoint and opened.checkpoint.run:
        found, problem = vocabulary_change.of_run(opened.checkpoint)
    if found is None:
        raise UserError(f"{flag}: its vocabulary is not known, as {problem}: give --vocabulary")
    if found.size > opened.model.config.vocab_size:
        raise UserError(
            f"{flag} has {opened.model.config.vocab_size:,} rows, and its vocabulary {found.name} "
            f"{found.size:,} ids: give the one that it was trained with by --vocabulary"
        )
    return found


def trimmed(opened: Opened, base: Vocabulary, id_map: list[int | None], left: Vocabulary) -> Opened:
    """Returns a checkpoint with the rows of `left` alone, and padding up to a multiple of 128.

    Args:
      opened: the checkpoint.
      base: its vocabulary.
      id_map: the new id of each id of `base`.
      left: what is left of `base`.
    """
    from tasks.vocabulary_changes import rows
    from trainer.starting import vocabulary_change

    model, flag = opened.model.config, f"--from={opened.source.path}"
    size = -(-left.size // _MULTIPLE) * _MULTIPLE
    made = rows.by_map(id_map, left.ids, model.vocab_size, size)
    axes = vocabulary_change.vocabulary_axes(model)
    shapes = {name: parts["value"].shape for name, parts in opened.parameters.items()}
    checkpoint = opened.checkpoint
    if checkpoint:
        state = vocabulary_change.changed_state(checkpoint.state, shapes, axes, made)
        run = checkpoint.run and {**checkpoint.run, "vocabulary_sha256": left.record.sha256}
        checkpoint = dataclasses.replace(checkpoint, state=state, run=run)
    name = opened.model.name
    if opened.source.transformers and _written(opened.source.path)["model_type"] == "mt5":
        name = "mt5"
    return opened._replace(
        # No longer what transformers loads from there.
        source=opened.source._replace(transformers=False),
        model=opened.model._replace(config=dataclasses.replace(model, vocab_size=size), name=name),
        parameters=vocabulary_change.changed(flag, opened.parameters, axes, made),
        checkpoint=checkpoint,
    )


def _written(folder: str) -> dict[str, Any]:
    return files.read_json(os.path.join(files.local_path(folder), "config.json"))


def _roles(opened: Opened) -> Any:
    """Returns the pieces around texts and the mask of an encoder-only folder; None for others."""
    from trainer.huggingface.tokenizer import TOKENIZER_CONFIG, Roles

    path = files.join(opened.source.path, TOKENIZER_CONFIG)
    if opened.model.config.architecture != "encoder" or not files.exists(path):
        return None
    written = files.read_json(path)
    names = [written.get(f"{role}_token") or "" for role in ("cls", "mask")]
    begins, mask = (each["content"] if isinstance(each, dict) else each for each in names)
    return Roles(begins=begins, mask=mask)


def _cut(flags: Any, opened: Opened, settings: Settings) -> tuple[Opened, Settings]:
    """Returns the smaller model and its vocabulary, after a check of its logits."""
    from tasks.reading import sources
    from tasks.vocabulary_changes import trimming, usage
    from trainer.conversion import targets, verify

    base = vocabulary_of(opened, flags.vocabulary, flags.extra_ids)
    corpus = sources.resolve(sources.parse(flags.corpus))
    for note in corpus.notes:
        print(note)
    counts = usage.count(base, corpus, flags.workers)
    found = trimming.trim(base, counts, flags.min_count, flags.vocab_size)
    print(f"vocabulary: {trimming.described(base, found, counts)}", flush=True)
    made = trimmed(opened, base, found.id_map, found.vocabulary)
    settings = dataclasses.replace(settings, vocabulary=found.vocabulary, roles=_roles(opened))
    targets.refuse(made, settings)
    import numpy as np

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    source: str = field(
        REQUIRED,
        "the model, as trainer.convert takes it: a folder of transformers, a checkpoint of this "
        "trainer or of T5X, or a folder of checkpoints, whose newest is taken",
        name="from",
        metavar="PATH",
    )
    corpus: str = field(REQUIRED, "text that the model is to keep", metavar="SPEC")
    to: str = field(REQUIRED, "local folder to write", metavar="FOLDER")
    format: str | None = field(
        None,
        "what to write; None: huggingface if the source is of transformers, else palimpsest",
        choices=_FORMATS,
    )
    min_count: int = field(1, "least occurrences of a kept piece", rule=at_least(1))
    vocab_size: int | None = field(
        None, "maximum number of pieces, without sentinels; None: no limit", rule=at_least(1)
    )
    workers: int = field(1, "processes that count pieces", rule=at_least(1))
    vocabulary: str | None = field(
        None, "the vocabulary, if the source does not have it", metavar="PATH"
    )
    extra_ids: int | None = field(
        None,
        "sentinels beyond the vocabulary's pieces; T5: 100",
        read_if=ReadIf(lambda flags: flags.vocabulary is not None, "without --vocabulary"),
    )
    preset: str | None = field(
        None, "the model of a checkpoint of T5X, as mt5_base", metavar="NAME"
    )


def run(flags: Flags) -> int:
    """Trims; returns 1 if what was written computes something different."""
    if files.is_remote(flags.to):
        raise UserError(f"--to={flags.to}: give a local folder")

    from trainer import convert
    from trainer.conversion import sources, targets
    from trainer.conversion.verify import NotEqual

    given = sources.Given(flags.preset)
    opened = sources.opened(sources.find(flags.source)[0][-1], given)
    own = targets.HUGGING_FACE if opened.source.transformers else targets.OURS
    settings = targets.Settings(flags.format or own)
    target = os.path.abspath(files.local_path(flags.to))
    try:
        made, settings = _cut(flags, opened, settings)
        convert.write(made, target, settings.format != targets.HUGGING_FACE, settings)
    except NotEqual as error:
        print(f"trainer.trim: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


main = Command(Flags, run, at_once="run the same command again", terminated=True)

if __name__ == "__main__":
    main.start()
