"""Cuts a model and its vocabulary to the pieces that a corpus needs, as mT5 to one language.

    python -m trainer.trim --from=mt5-small --corpus='parquet:ro/*.parquet' --to=mt5-small-ro

Rows of kept pieces stay, in the embedding and in the logits, and so do all other parameters: logits
of kept pieces are those of the source. What is written is checked as by trainer.convert.
"""

from __future__ import annotations

from tasks.terminal import interrupt

if __name__ == "__main__":
    interrupt.end_at_once(  # also while the rest is imported
        "python -m trainer.trim", "run the same command again", terminated=True
    )

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError, positive

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


def _parser() -> Parser:
    parser = Parser(prog="python -m trainer.trim", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        required=True,
        metavar="PATH",
        help="the model, as trainer.convert takes it: a folder of transformers, a checkpoint of "
        "this trainer or of T5X, or a folder of them, of which the newest is taken",
    )
    add("--corpus", required=True, metavar="SPEC", help="text that the model is to keep")
    add("--to", required=True, metavar="FOLDER", help="local folder to write")
    add(
        "--format",
        choices=_FORMATS,
        help="what to write; huggingface if that is the source, else palimpsest",
    )
    add("--min_count", type=positive, default=1, help="least occurrences of a kept piece")
    add("--vocab_size", type=positive, help="most pieces, without sentinels; no limit if left out")
    add("--workers", type=positive, default=1, help="processes that count pieces")
    add("--vocabulary", metavar="PATH", help="the vocabulary, where the source does not have it")
    add("--extra_ids", type=int, metavar="N", help="sentinels beyond its pieces; T5: 100")
    add("--preset", metavar="NAME", help="the model of a checkpoint of T5X, as mt5_base")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if what was written computes something different."""
    flags = _parser().parse_args(argv)
    if flags.extra_ids is not None and not flags.vocabulary:
        raise UserError("--extra_ids has no effect without --vocabulary")
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
        print(f"python -m trainer.trim: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
