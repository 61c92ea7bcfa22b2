"""Cuts a model and its vocabulary to what a corpus needs.

    palimpsest trim --from=mt5-small --corpus='parquet:ro/*.parquet' --to=mt5-small-ro

The rows of kept pieces stay unchanged in the embedding and the logits, as do all other parameters,
so kept pieces have the source's logits. The result is checked as in palimpsest convert.
"""

import dataclasses
import os
import sys

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, ReadIf, at_least, field

_FORMATS = ("huggingface", "t5x", "palimpsest")
_EXIT_NOT_EQUAL = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    source: str = field(
        REQUIRED,
        "the model, as in palimpsest convert: a folder of transformers, a checkpoint of this "
        "trainer or of T5X, or a folder of checkpoints, whose newest is used",
        name="from",
        metavar="PATH",
    )
    corpus: str = field(REQUIRED, "text whose pieces the model keeps", metavar="SPEC")
    to: str = field(REQUIRED, "local folder to write", metavar="FOLDER")
    format: str | None = field(
        None,
        "what to write; None: huggingface if the source is from transformers, else palimpsest",
        choices=_FORMATS,
    )
    min_count: int = field(1, "minimum occurrences of a kept piece", rule=at_least(1))
    vocab_size: int | None = field(
        None, "maximum number of pieces, without sentinels; None: no limit", rule=at_least(1)
    )
    workers: int = field(1, "number of processes that count pieces", rule=at_least(1))
    vocabulary: str | None = field(
        None, "the vocabulary, if the source does not have it", metavar="PATH"
    )
    extra_ids: int | None = field(
        None,
        "number of sentinels beyond the vocabulary's pieces; T5: 100",
        read_if=ReadIf(lambda flags: flags.vocabulary is not None, "without --vocabulary"),
    )
    preset: str | None = field(
        None, "the model of a T5X checkpoint, such as mt5_base", metavar="NAME"
    )


def run(flags: Flags) -> int:
    """Trims; returns 1 if the written model computes different results."""
    if files.is_remote(flags.to):
        raise UserError(f"--to={flags.to}: give a local folder")

    from trainer.annexes.conversion import converting, sources, targets
    from trainer.annexes.conversion.verify import NotEqual
    from trainer.annexes.trimming_models import trimming

    given = sources.Given(flags.preset)
    opened = sources.opened(sources.find(flags.source)[0][-1], given)
    own = targets.HUGGING_FACE if opened.source.transformers else targets.OURS
    settings = targets.Settings(format=flags.format or own)
    target = os.path.abspath(files.local_path(flags.to))
    try:
        made, settings = trimming.cut(flags, opened, settings)
        converting.write(made, target, settings.format != targets.HUGGING_FACE, settings)
    except NotEqual as error:
        print(f"palimpsest trim: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


main = Command(Flags, run, at_once="run the same command again", terminated=True)

if __name__ == "__main__":
    main.start()
