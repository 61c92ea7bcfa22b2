"""Loads an exported folder with transformers alone, as its readers will."""

import pathlib
from typing import Any


def problem(folder: str) -> str | None:
    """Returns what transformers does not load of a folder's model; None if it is whole.

    Raises what transformers does for a folder that it cannot read, or a tokenizer.
    """
    import transformers

    theirs: Any = transformers
    config = theirs.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    (name,) = config.architectures
    kind = getattr(theirs, name, theirs.AutoModelForCausalLM)  # a modelling file of its own
    _, report = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=True)
    if (pathlib.Path(folder) / "tokenizer.json").exists():
        theirs.AutoTokenizer.from_pretrained(folder)
    wrong = [f"{what} {sorted(each)[0]}" for what, each in report.items() if each]
    return f"transformers does not load {folder} whole: {', '.join(wrong)}" if wrong else None
