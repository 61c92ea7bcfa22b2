"""The ids with a role that a transformers folder names: padding, EOS, BOS, the decoder's start.

config.json and generation_config.json both name them; `generate` obeys the latter.
"""

import os
from collections.abc import Mapping
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import PAD_ID

GENERATION = "generation_config.json"
START, EOS, PAD = "decoder_start_token_id", "eos_token_id", "pad_token_id"
NAMES = ("bos_token_id", START, EOS, PAD)

# File -> name -> id, or a list of ids for EOS; only the ids that the file has.
Ids = dict[str, dict[str, Any]]


def read(folder: str, config: str, written: Mapping[str, Any]) -> Ids:
    """Returns the ids of a local folder, whose file `config` has the fields `written`.

    Raises a UserError if the two files contradict each other.
    """
    where = os.path.join(folder, GENERATION)
    generation: Any = {}
    if os.path.isfile(where):
        try:
            generation = files.read_json(where)
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON: {error}") from error
    places = {config: written, GENERATION: generation}
    found = {file: _named(each, os.path.join(folder, file)) for file, each in places.items()}
    for name, value in found[config].items():
        other = found[GENERATION].get(name, value)
        if not _all(value) & _all(other):
            raise UserError(
                f"{os.path.join(folder, config)}: {name} is {value!r}, but {GENERATION} has "
                f"{other!r}: make them agree"
            )
    return found


def _named(written: Any, where: str) -> dict[str, Any]:
    if not isinstance(written, Mapping):
        raise UserError(f"{where} is not an object with fields")
    found = {name: written[name] for name in NAMES if written.get(name) is not None}
    for name, value in found.items():
        several = isinstance(value, list) and name == EOS
        if any(type(each) is not int for each in (value if several else [value])):
            raise UserError(f"{where}: {name} is {str(value)[:40]!r}: it must be an id")
    return found


def pad(written: Mapping[str, Any]) -> int:
    """Returns the padding id of config.json's fields, PAD_ID if they name none."""
    found = written.get(PAD)
    return PAD_ID if found is None else int(found)


def _all(value: Any) -> set[int]:
    """Returns the ids of a field, which is an id or a list of ids."""
    return {*value} if isinstance(value, list) else {value}


def start(ids: Ids, where: str, vocab_size: int, otherwise: str = PAD) -> int:
    """Returns the id that an encoder-decoder's decoder reads first; without one, `otherwise`'s."""
    found = next((each[START] for each in ids.values() if START in each), None)
    if found is None:
        found = next((each[otherwise] for each in ids.values() if otherwise in each), PAD_ID)
    if type(found) is not int or not 0 <= found < vocab_size:
        raise UserError(
            f"{where}: {START} is {found!r}; it must be an id below vocab_size, which is "
            f"{vocab_size}"
        )
    return found


def check_eos(ids: Ids, where: str, vocab_size: int, eos: int, of: str) -> None:
    """Raises a UserError if the folder has EOS ids and `eos`, which `of` has, is not among them."""
    known = {token for each in ids.values() for token in _all(each.get(EOS, []))}
    # Old folders have -1 for none.
    usable = {token for token in known if type(token) is int and 0 <= token < vocab_size}
    if usable and eos not in usable:
        text = ", ".join(map(str, sorted(usable)))
        raise UserError(
            f"{where}: {EOS} is {text}, but EOS of {of} is {eos}: name the folder's own "
            "vocabulary, or correct the field"
        )
