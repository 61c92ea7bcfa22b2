"""Converts checkpoints between T5X, transformers and ours.

    palimpsest convert --from=PATH --to=FOLDER --format=huggingface|t5x|palimpsest

Formats: T5X, Hugging Face transformers, Mesh TensorFlow (read only) and this trainer's own format.
PATH is one checkpoint or a folder of them. Each is written under a temporary name, read back, and
compared bit for bit; if transformers can load one side, its logits are compared with ours. Only
then does it get its final name, so the same command continues after a kill.
"""

import dataclasses
import sys
from typing import ClassVar

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, ReadIf, field
from tasks.terminal.flags import groups_of_annexes

_FORMATS = ("huggingface", "t5x", "palimpsest")
_DTYPES = ("float32", "bfloat16")
_EXIT_NOT_EQUAL = 1


def _only(format: str) -> ReadIf:
    return ReadIf(lambda flags: flags.format == format, lambda flags: f"on --format={flags.format}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model, for a checkpoint that does not describe it."""

    preset: str | None = field(None, "a preset, such as t5_1_1_base", metavar="NAME")
    model: tuple[str, ...] = field(
        (),
        "a field of the model; usually written as --model.FIELD=VALUE",
        metavar="FIELD=VALUE",
        repeated=True,
        aliases=("model.*",),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    ANNEXES: ClassVar[str] = "model_flags"

    source: str = field(
        REQUIRED,
        "checkpoint or folder of checkpoints: checkpoint_STEP of T5X or of this trainer, folders "
        "of transformers, model.ckpt-STEP of Mesh TensorFlow; local or, except for transformers, "
        "remote",
        name="from",
        metavar="PATH",
    )
    to: str = field(REQUIRED, "local folder to write", metavar="FOLDER")
    format: str = field(REQUIRED, "what to write", choices=_FORMATS)
    steps: str = field(
        "all", "steps of a folder to convert: all, latest, or 1000,2000", aliases=("step",)
    )
    dtype: str = field(
        "float32",
        "precision of the stored parameters",
        choices=_DTYPES,
        read_if=ReadIf(
            lambda flags: flags.format != "palimpsest",
            "on --format=palimpsest, which keeps its parameters in float32",
        ),
    )
    vocabulary: str | None = field(
        None,
        "vocabulary to write with the model: a file or a folder",
        metavar="FILE",
        read_if=ReadIf(
            lambda flags: flags.format != "t5x", "on --format=t5x: T5X's tasks name their own"
        ),
    )
    extra_ids: int | None = field(
        None,
        "number of the model's sentinels beyond the pieces of the vocabulary; T5: 100",
        read_if=ReadIf(lambda flags: flags.vocabulary is not None, "without --vocabulary"),
    )
    scan_layers: bool = field(
        False,
        "t5x: write the layout of examples/scalable_t5, which joins the layers of a stack",
        read_if=_only("t5x"),
    )
    custom_code: bool = field(
        False,
        "huggingface: write a modelling file for a model that transformers does not have",
        read_if=_only("huggingface"),
    )
    unverified: bool = field(
        False,
        "keep a conversion even if its logits cannot be compared with transformers', which needs "
        "torch and transformers",
    )
    push_to: str | None = field(
        None,
        "huggingface: upload each step to branch step_N of this repository on the Hub, and the "
        "last one also to main, with the token in HF_TOKEN",
        metavar="OWNER/NAME",
        read_if=_only("huggingface"),
    )
    task: str = field(
        "",
        "palimpsest: task of a cache; trainer.evaluate, trainer.export and others open the run "
        "with it",
        read_if=_only("palimpsest"),
    )
    cache_dir: str = field(
        "", "palimpsest: folder or URL with the task's cache", read_if=_only("palimpsest")
    )
    max_shard_size: str | None = field(
        None, "huggingface: largest size of a weights file; None: 5GB", read_if=_only("huggingface")
    )
    model: ModelFlags = field(
        ModelFlags,
        "the model, for checkpoints of T5X and Mesh TensorFlow that do not describe it",
        flat=True,
    )


def _check(flags: Flags) -> int:
    """Returns the largest size of a weights file in bytes.

    Raises:
      UserError: a package is missing, the size cannot be read, or `push_to` is invalid or lacks
        a token.
    """
    from trainer.huggingface import hub, require_packages, weights

    wanted = ["safetensors", "huggingface_hub"] if flags.format == "huggingface" else []
    wanted += ["sentencepiece", "tokenizers"] if flags.vocabulary else []
    require_packages(wanted, f"converting to {flags.format}")
    if flags.push_to:
        hub.check(flags.push_to)
    return weights.size(flags.max_shard_size or "5GB")


def run(flags: Flags) -> int:
    """Converts; returns 1 if the written model computes different results."""
    size = _check(flags)

    from tasks import vocabulary
    from trainer.annexes.conversion import converting
    from trainer.annexes.conversion.sources import Given, model_files
    from trainer.annexes.conversion.targets import Settings
    from trainer.annexes.conversion.verify import NotEqual

    if bool(flags.task) != bool(flags.cache_dir):
        raise UserError("--task and --cache_dir need each other")
    found = flags.vocabulary and vocabulary.load(flags.vocabulary, flags.extra_ids or 0)
    settings = Settings(
        format=flags.format,
        dtype=flags.dtype,
        scanned=flags.scan_layers,
        custom_code=flags.custom_code,
        shard_bytes=size,
        vocabulary=found or None,
        task=flags.task,
        cache_dir=flags.cache_dir,
        unverified=flags.unverified,
    )
    fields = tuple(f"--model.{each}" for each in flags.model.model)
    described = tuple(groups_of_annexes(flags)) or model_files()
    given = Given(flags.model.preset, fields, described)
    try:
        converting.convert(flags.source, flags.to, settings, given, flags.steps, flags.push_to)
    except NotEqual as error:
        print(f"palimpsest convert: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


main = Command(Flags, run, at_once="run the same command again", terminated=True)

if __name__ == "__main__":
    main.start()
