"""Packages that conversions need in addition to the trainer's own."""

import importlib.util

from tasks.terminal.command_line import UserError
from trainer.huggingface import EXTRA


def check_packages(format: str, vocabulary: bool) -> None:
    """Raises UserError if a package that the conversion needs is not installed."""
    wanted = ["safetensors", "huggingface_hub"] if format == "huggingface" else []
    wanted += ["sentencepiece", "tokenizers"] if vocabulary else []
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"converting to {format} needs the package {name}: {EXTRA}")
