"""The files of a vocabulary's folder: which one is read, and whether those beside it agree.

transformers spreads a tokenizer over several files, and reads tokens that users added from any of
them. A file that says what the vocabulary cannot do is refused: texts would get other ids.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabularies import registered, sentencepiece_model, tokenizer_json
from tasks.vocabularies.pieces import NORMAL, Pieces

# SentencePiece models: ours, and transformers' for T5 and Llama.
_MODELS = (sentencepiece_model.FILE, "spiece.model", "tokenizer.model")
_FILES = (*_MODELS, tokenizer_json.FILE, registered.FILE)
_ADDED = "added_tokens.json"
# Classes of transformers, without "Fast": generic ones, which ignore settings of words; those that
# lower-case by default; and those for SentencePiece models that never lower-case.
# Source: transformers 5.23.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_LOWERING = ("AlbertTokenizer",)
_KEEPING = ("T5Tokenizer", "MT5Tokenizer", "LlamaTokenizer", "GemmaTokenizer")
# Keys that name one token.
_ROLES = tuple(f"{role}_token" for role in ("pad", "eos", "unk", "bos", "sep", "cls", "mask"))
# Words without the signs and spaces that libraries treat in their own ways.
_TEXTS = ["the house", "The Quick brown Fox", "Hello", "naïve Ünïcode", "internationalization"]
_TEXTS += ["1984 2026", "Straße și pădure", "данные и слова", "数据"]


def chosen(folder: str) -> str:
    """Returns the path of the file that describes the vocabulary of a folder.

    Raises UserError if the folder has two SentencePiece models that differ.
    """
    found = [path for name in _FILES if files.exists(path := files.join(folder, name))]
    models = [path for path in found if not path.endswith(".json")]
    for other in models[1:]:
        if files.sha256(other) != files.sha256(models[0]):
            raise UserError(f"{models[0]} and {other} differ: name the one to be read")
    return found[0] if found else files.join(folder, sentencepiece_model.FILE)


def configs(place: str) -> list[dict[str, Any]]:
    """Returns the contents of transformers' files CONFIGS beside a tokenizer.json."""
    folder = place.rpartition("/")[0] or "."
    found = (_read(files.join(folder, name)) for name in tokenizer_json.CONFIGS)
    return [each for each in found if each]


def _read(path: str) -> dict[str, Any]:
    """Returns the contents of a JSON file; {} if there is none."""
    if not files.exists(path):
        return {}
    try:
        value = json.loads(files.read_bytes(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: restore it or remove it") from error
    return value if isinstance(value, dict) else {}


def are_there(place: str) -> bool:
    """Returns whether files of transformers lie beside the vocabulary's file `place`."""
    folder = place.rpartition("/")[0] or "."
    names = (_ADDED, tokenizer_json.FILE, *tokenizer_json.CONFIGS)
    return any(files.exists(files.join(folder, name)) for name in names)


def check(place: str, pieces: Pieces, is_sentinel: Callable[[str, int | None], bool]) -> None:
    """Checks the files of transformers beside the vocabulary's file `place`.

    `is_sentinel` takes a token's name and id. Raises UserError for the first token that another
    file has, or has with another id, unless it is a sentinel or the padding.
    """
    folder = place.rpartition("/")[0] or "."
    other, added = files.join(folder, tokenizer_json.FILE), files.join(folder, _ADDED)
    whole = _read(other)
    if whole and not place.endswith(".json"):
        _compare(place, pieces, files.read_bytes(other), other)
    read = {name: _read(files.join(folder, name)) for name in tokenizer_json.CONFIGS}
    read = {tokenizer_json.FILE: whole, **read}
    padding = {_text(each.get("pad_token")) for each in read.values()}
    roles = {_text(each.get(key)) for each in read.values() for key in _ROLES}
    ids = {name: number for number, name in enumerate(pieces.names)}
    named: list[tuple[str, str, int | None]] = []
    try:
        named += [(_ADDED, text, int(number)) for text, number in _read(added).items()]
        named += [(name, *each) for name, value in read.items() for each in _named(value)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: the tokens in {_ADDED}, {' or '.join(read)} are damaged: restore the folder"
        ) from error
    for name, text, number in named:
        found = ids.get(text)
        at_id = number is not None and number < len(ids) and pieces.names[number] == text
        known = at_id or (found is not None and number is None)
        # transformers cuts texts at such a token, also within words.
        cuts = known and found is not None and pieces.kinds[found] == NORMAL and text not in roles
        is_padding = found is None and text in padding
        if is_sentinel(text, number) or (known and not cuts) or is_padding:
            continue
        with_id = f" with the id {number}" if number is not None else ""
        instead = "" if found is None else f", which has it as {found}"
        instead = ", which has it as a piece like any other" if cuts else instead
        raise UserError(
            f"{files.join(folder, name)} has the token {text}{with_id}, unlike {place}{instead}: "
            f"texts would be encoded otherwise than by transformers. {_remedy(place, text, whole)}"
        )


def compare_ids(
    place: str, encode: Callable[[list[str]], list[np.ndarray]], unknown: int | None
) -> None:
    """Raises UserError if files beside a SentencePiece model encode words otherwise.

    `encode` is the model's. Texts that neither can spell are left out.
    """
    folder = place.rpartition("/")[0] or "."
    ours = encode(_TEXTS)
    other = files.join(folder, tokenizer_json.FILE)
    if files.exists(other):
        _compare_texts(place, ours, unknown, other)
    if lowers := _lowers(folder):
        lowered = encode([each.lower() for each in _TEXTS])
        if any(map(_differ, ours, lowered)):
            raise _contradiction(place, folder, lowers)


def _compare_texts(place: str, ours: list[np.ndarray], unknown: int | None, other: str) -> None:
    model = files.read_bytes(other)
    lost = tokenizer_json.unknown_id(tokenizer_json.parsed(model, other))
    theirs = tokenizer_json.TokenizersCodec(model, other).encode(_TEXTS)
    for text, mine, found in zip(_TEXTS, ours, theirs, strict=True):
        if not (unknown in mine and lost in found) and _differ(mine, found):
            raise UserError(
                f"{place} and {other} encode {text!r} differently: they are two vocabularies. "
                "Name the file to be read"
            )


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tolist() != other.tolist()


def _lowers(folder: str) -> str:
    """Returns what says that transformers lower-cases texts for a SentencePiece model, or ""."""
    config = _read(files.join(folder, tokenizer_json.CONFIGS[0]))
    kind = str(config.get("tokenizer_class") or "")
    lowers = config.get("do_lower_case", kind.startswith(_LOWERING))
    if not lowers or kind.startswith((*_KEEPING, *_GENERIC)):
        return ""
    return f"do_lower_case={lowers} ({kind or 'no class'})"


def check_settings(place: str, model: bytes, configs: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError if the files CONFIGS beside a tokenizer.json contradict it.

    transformers then sets the tokenizer as these say.
    """
    config = {key: value for each in reversed(configs) for key, value in each.items()}
    if str(config.get("tokenizer_class") or "").startswith(_GENERIC):
        return
    for key, there in tokenizer_json.settings(tokenizer_json.parsed(model, place)).items():
        said = config.get(key)
        if key == "strip_accents" and said is None:  # it is as do_lower_case
            said = config.get("do_lower_case")
        if said is not None and bool(said) != there:
            raise _contradiction(place, place.rpartition("/")[0] or ".", f"{key}={said}")


def _contradiction(place: str, folder: str, said: str) -> UserError:
    return UserError(
        f"{files.join(folder, tokenizer_json.CONFIGS[0])} says {said}, but {place} does otherwise: "
        f"texts would be encoded otherwise than by transformers. --vocabulary={place} reads that "
        "file alone"
    )


def _remedy(place: str, token: str, whole: Mapping[str, Any]) -> str:
    alone = f"--vocabulary={place} reads that file alone, and spells such tokens in other pieces"
    added = {_text(each): each["id"] for each in whole.get("added_tokens") or []}
    sentinel = added.get("<extra_id_0>")
    if sentinel is not None and sentinel < max(added.values()):  # which must be the last
        return f"{alone}; vocab.train --user_defined_symbols makes a vocabulary that has them"
    if token in added and not place.endswith(".json"):
        other = f"{place.rpartition('/')[0] or '.'}/{tokenizer_json.FILE}"
        return f"--vocabulary={other} reads the file that has them; {alone}"
    return alone


def _compare(place: str, pieces: Pieces, whole: bytes, other: str) -> None:
    """Raises UserError if a SentencePiece model and a tokenizer.json differ in a piece of text."""
    names = tokenizer_json.pieces(whole).names
    for number, (piece, kind) in enumerate(zip(pieces.names, pieces.kinds, strict=True)):
        there = names[number] if number < len(names) else "nothing"
        if kind == NORMAL and there != piece:
            raise UserError(
                f"{place} has {piece} as id {number}, but {other} has {there}: they are two "
                "vocabularies. Name the file to be read"
            )


def _named(value: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    """Yields the tokens that a file of transformers adds to a model, with ids where given."""
    for token in value.get("added_tokens") or []:
        yield _text(token), token["id"]
    for number, token in (value.get("added_tokens_decoder") or {}).items():
        yield _text(token), int(number)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = value.get(key) or []
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            yield _text(token), None
    yield from ((_text(value[key]), None) for key in _ROLES if value.get(key))


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token or "")
