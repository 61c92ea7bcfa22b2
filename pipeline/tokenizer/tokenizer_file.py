"""Makes the fast tokenizer's tables from a tokenizer.json, or says what is unsupported.

Supports byte-level BPE with a pattern of `byte_level.PATTERNS`, and WordPiece with BERT's words.
"""

import functools
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.tokenizer import added_tokens, byte_level, characters, table_cache, trie, word_kernels
from pipeline.tokenizer.fast_tokenizer import Unsupported
from tasks.vocabularies.byte_level import alphabet

_COMPOSES = ("NFC", "NFKC")
_DECOMPOSES = ("NFD", "NFKD")
_BY_CHARACTER = ("BertNormalizer", "Lowercase", "StripAccents", *_DECOMPOSES)


class Rules(NamedTuple):
    """A supported tokenizer.json, as returned by `tokenizer_json.parsed`.

    `steps` are the normaliser's, with sequences flattened; `places` are fields of
    `byte_level.Words` for byte-level BPE, None for WordPiece.
    """

    value: Mapping[str, Any]
    normaliser: Any
    steps: Sequence[Mapping[str, Any]]
    places: Mapping[str, Any] | None

    @property
    def is_bytes(self) -> bool:
        model = self.value["model"]
        plain = self.places is not None and not self.places["prefix"]
        apart = self.steps or self.value.get("added_tokens") or model.get("ignore_merges")
        return plain and not model["merges"] and not apart


def rules(value: Mapping[str, Any], normaliser: Any) -> Rules:
    """Returns the rules of a tokenizer.json; raises Unsupported with the missing feature."""
    model = value["model"]
    kind = model.get("type", "BPE")
    steps = [*_steps(value.get("normalizer"), "normalizers")]
    cutters = [*_steps(value.get("pre_tokenizer"), "pretokenizers")]
    for token in value.get("added_tokens") or ():
        if "\0" in token["content"]:
            raise Unsupported("an added token has a zero byte")
    if kind not in ("WordPiece", "BPE"):
        raise Unsupported(f"its model {kind} is neither BPE nor WordPiece")
    if kind == "WordPiece":
        _check_word_piece(value, steps, cutters)
        found = Rules(value, normaliser, steps, None)
    else:
        found = Rules(value, normaliser, steps, _places(cutters))
        _check_bpe(model, steps)
    if len({*model["vocab"].values()}) < len(model["vocab"]):
        raise Unsupported("two pieces have the same id")
    if kind == "WordPiece":
        return found
    for token in value.get("added_tokens") or ():
        if normaliser and normaliser.normalize_str(token["content"]) != token["content"]:
            raise Unsupported(f"its normalizer changes the added token {token['content']}")
    if "pattern" not in found.places and not found.is_bytes:  # type: ignore[operator]
        raise Unsupported("its pre-tokenizer ByteLevel without use_regex does not cut words")
    return found


def _steps(part: Any, key: str) -> Iterator[Mapping[str, Any]]:
    if part and part["type"] == "Sequence":
        for each in part[key]:
            yield from _steps(each, key)
    elif part:
        yield part


def _places(cutters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns "prefix" and, if words are cut, the pattern's fields of Words."""
    *before, last = cutters or [{"type": "none"}]
    if last["type"] != "ByteLevel":
        raise Unsupported(f"its model is BPE, but its last pre-tokenizer {last['type']}")
    prefix = bool(last.get("add_prefix_space", True))
    cuts = last.get("use_regex", True)
    if not before:
        return {"prefix": prefix, **(_pattern(byte_level.GPT2) if cuts else {})}
    first = before[0]
    if len(before) > 1 or cuts or prefix or first["type"] != "Split":
        raise Unsupported(
            f"its pre-tokenizer is {', '.join(each['type'] for each in cutters)}; supported are "
            "ByteLevel, and Split before ByteLevel without a regex and prefix"
        )
    isolates = first["behavior"] == "Isolated" and not first.get("invert", False)
    keeps = first["behavior"] == "Removed" and first.get("invert", False)
    # Matches cover every text, so nothing between them needs removing.
    if "Regex" not in first["pattern"] or not (isolates or keeps):
        raise Unsupported("its pre-tokenizer Split does not isolate the matches of a regex")
    return {"prefix": False, **_pattern(first["pattern"]["Regex"])}


def _pattern(regex: str) -> dict[str, Any]:
    found = byte_level.places(regex)
    if found is None:
        raise Unsupported(f"its pre-tokenizer's regex is not one of GPT-2's relatives: {regex}")
    return {"pattern": True, **found}


def _check_bpe(model: Mapping[str, Any], normalisers: Sequence[Mapping[str, Any]]) -> None:
    names = [each["type"] for each in normalisers]
    if len(names) > 1 or any(name not in _COMPOSES for name in names):
        raise Unsupported(f"its model is BPE, but its normalizer {', '.join(names)}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise Unsupported(f"its model has {key}")
    missing = sum(character not in model["vocab"] for character in alphabet())
    if missing:
        raise Unsupported(f"its vocabulary lacks {missing} of the 256 bytes")


_Steps = Sequence[Mapping[str, Any]]


def _check_word_piece(value: Mapping[str, Any], normalisers: _Steps, cutters: _Steps) -> None:
    model = value["model"]
    for each in normalisers:
        if each["type"] not in _BY_CHARACTER:
            raise Unsupported(f"its model is WordPiece, but its normalizer {each['type']}")
    names = [each["type"] for each in cutters]
    if names != ["BertPreTokenizer"]:
        raise Unsupported(
            f"its model is WordPiece, but its pre-tokenizer {', '.join(names) or 'none'}"
        )
    for token in value.get("added_tokens") or ():
        if normalisers and token.get("normalized", True):
            raise Unsupported(f"its added token {token['content']} is found in normalised text")
    if model["unk_token"] not in model["vocab"]:
        raise Unsupported("its vocabulary lacks the unknown token")
    if any("\0" in piece for piece in model["vocab"]):
        raise Unsupported("a piece has a zero byte")


def words(of: Rules, tokens: Iterable[str]) -> byte_level.Words | characters.Actions:
    """Returns the rules that cut texts into words; texts with one of `tokens` are refused."""
    tables = added_tokens.table((token, 0) for token in tokens)
    found: dict[str, Any] = dict(zip(("tokens", "begins_token"), tables, strict=True))
    kind = "WordPiece" if of.places is None else "BPE"
    version = importlib.metadata.version("tokenizers")
    key = json.dumps([version, kind, *of.steps], sort_keys=True).encode()
    modules = (characters.__file__, word_kernels.__file__)
    if of.places is None:
        decomposes = any(map(_decomposes, of.steps))
        make = functools.partial(characters.actions, of.normaliser, decomposes)
        names = ("actions", "right_sides", "longest")
        return characters.Actions(**table_cache.load_or_make(key, modules, names, make), **found)

    def kinds() -> dict[str, Any]:
        kinds = characters.kinds()
        if of.normaliser:
            kinds[characters.changed_by(of.normaliser)] |= word_kernels.CHANGES
        return {"kinds": kinds}

    found |= {name: value for name, value in of.places.items() if name != "pattern"}
    return byte_level.Words(**table_cache.load_or_make(key, modules, ["kinds"], kinds), **found)


def _decomposes(step: Mapping[str, Any]) -> bool:
    if step["type"] == "BertNormalizer":
        strips = step.get("strip_accents")
        return step.get("lowercase", True) if strips is None else strips
    return step["type"] in _DECOMPOSES


def model(of: Rules) -> word_kernels.Model:
    of_model = of.value["model"]
    vocab = of_model["vocab"]
    if of.places is None:
        prefix = of_model["continuing_subword_prefix"]
        following = [
            (piece.removeprefix(prefix).encode(), number)
            for piece, number in vocab.items()
            if piece.startswith(prefix) and len(piece) > len(prefix)
        ]
        return word_kernels.Model(
            word_kernels.WORD_PIECE,
            pairs=np.zeros((16, 2), np.int64),
            byte_ids=np.zeros(256, np.int32),
            whole=False,
            initial=trie.build((piece.encode(), id_) for piece, id_ in vocab.items() if piece),
            continuing=trie.build(following),
            unknown=vocab[of_model["unk_token"]],
            longest=of_model["max_input_chars_per_word"],
        )
    byte_ids = np.zeros(256, np.int32)
    for character, byte in alphabet().items():
        byte_ids[byte] = vocab[character]
    whole = bool(of_model.get("ignore_merges"))
    both = [each.split(" ") if isinstance(each, str) else each for each in of_model["merges"]]
    ids = [(vocab[left], vocab[right], vocab[left + right]) for left, right in both]
    columns = np.array(ids, np.int32).reshape(-1, 3)
    return word_kernels.Model(
        word_kernels.BPE,
        pairs=word_kernels.pair_table(*(columns[:, place].copy() for place in range(3))),
        byte_ids=byte_ids,
        whole=whole,
        initial=trie.build(_spelt(vocab) if whole else ()),
        continuing=trie.build(()),
        unknown=0,
        longest=0,
    )


def _spelt(vocab: Mapping[str, int]) -> Iterator[tuple[bytes, int]]:
    """Yields pieces that consist of bytes, spelt as in `word_kernels.Model.initial`."""
    known = alphabet()
    halves = str.maketrans(
        {char: chr((byte >> 4) + 1) + chr((byte & 15) + 1) for char, byte in known.items()}
    )
    for piece, number in vocab.items():
        if piece and known.keys() >= {*piece}:
            yield piece.translate(halves).encode(), number
