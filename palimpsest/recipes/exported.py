"""Loads an exported folder with transformers alone, as its readers will.

    python -m palimpsest.recipes.exported FOLDER

It names tensors that are missing, left over or of another shape.
"""

import dataclasses
import os
import pathlib
from typing import Any

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    folder: str = field("", "folder of an export", positional=True, metavar="FOLDER")


def run(flags: Flags) -> int:
    """Loads the model and the tokenizer of a folder; raises UserError if either is not whole."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    folder = flags.folder
    theirs: Any = transformers
    config = theirs.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    (name,) = config.architectures
    kind = getattr(theirs, name, theirs.AutoModelForCausalLM)  # a modelling file of its own
    _, report = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=True)
    wrong = [f"{what} {sorted(each)[0]}" for what, each in report.items() if each]
    if wrong:
        raise UserError(f"transformers does not load {folder} whole: {', '.join(wrong)}")
    if (pathlib.Path(folder) / "tokenizer.json").exists():
        theirs.AutoTokenizer.from_pretrained(folder)
    return 0


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
