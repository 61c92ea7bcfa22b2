"""Makes the fast tokenizer of a tokenizer.json, or says what is unsupported.

Supports byte-level BPE with a pattern of `byte_level.PATTERNS`, WordPiece with BERT's words, and
unigram models with SentencePiece's normaliser and words.
"""

import functools
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.tokenizer import (
    added_tokens,
    byte_level,
    byte_pairs,
    characters,
    table_cache,
    trie,
    unigrams,
    word_pieces,
)
from pipeline.tokenizer.byte_pairs import BytePairTokenizer, ByteTokenizer
from pipeline.tokenizer.word_pieces import WordPieceTokenizer
from pipeline.tokenizer.word_tokenizer import Unsupported, WordTokenizer
from tasks.vocabularies import tokenizer_json
from tasks.vocabularies.byte_level import alphabet

_COMPOSES = ("NFC", "NFKC")
_DECOMPOSES = ("NFD", "NFKD")
_BY_CHARACTER = ("BertNormalizer", "Lowercase", "StripAccents", *_DECOMPOSES)


class Rules(NamedTuple):
    """A supported tokenizer.json, as returned by `tokenizer_json.parsed`.

    `steps` are the normaliser's, with sequences flattened; `places` are fields of
    `byte_level.Words` for byte-level BPE, `unigrams.spacing` for Unigram, None for WordPiece.
    """

    value: Mapping[str, Any]
    normaliser: Any
    steps: Sequence[Mapping[str, Any]]
    places: Mapping[str, Any] | None

    @property
    def is_bytes(self) -> bool:
        model = self.value["model"]
        plain = self.places is not None and model["type"] == "BPE" and not self.places["prefix"]
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
    if kind == "Unigram":
        spaces = unigrams.spacing(value, steps, cutters)
        unigrams.check(value, normaliser)
        return Rules(value, normaliser, steps, spaces)
    if kind not in ("WordPiece", "BPE"):
        raise Unsupported(f"its model {kind} is neither BPE, WordPiece nor Unigram")
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
            f"its pre-tokenizer is {', '.join(cutter['type'] for cutter in cutters)}; supported "
            "are ByteLevel, and Split before ByteLevel without a regex and prefix"
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
    names = [normaliser["type"] for normaliser in normalisers]
    if len(names) > 1 or any(name not in _COMPOSES for name in names):
        raise Unsupported(f"its model is BPE, but its normalizer {', '.join(names)}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise Unsupported(f"its model has {key}")
    if len(model["merges"]) > tokenizer_json.LARGEST_ID:
        raise Unsupported(f"it has more than {tokenizer_json.LARGEST_ID:,} merges")
    missing = sum(character not in model["vocab"] for character in alphabet())
    if missing:
        raise Unsupported(f"its vocabulary lacks {missing} of the 256 bytes")


_Steps = Sequence[Mapping[str, Any]]


def _check_word_piece(value: Mapping[str, Any], normalisers: _Steps, cutters: _Steps) -> None:
    model = value["model"]
    for normaliser in normalisers:
        if normaliser["type"] not in _BY_CHARACTER:
            raise Unsupported(f"its model is WordPiece, but its normalizer {normaliser['type']}")
    names = [cutter["type"] for cutter in cutters]
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


def tokenizer(model: bytes, codec: tokenizer_json.TokenizersCodec) -> WordTokenizer | ByteTokenizer:
    """Makes the tokenizer of a tokenizer.json, also read by `codec`; may raise Unsupported."""
    of = rules(tokenizer_json.parsed(model), codec.tokenizer.normalizer)
    if of.value["model"]["type"] == "Unigram":
        return unigrams.tokenizer(of.value, of.places or {}, codec)
    if of.places is None:
        passes, refused = added_tokens.passes(codec.tokenizer)
        if refused:
            raise Unsupported(f"its added token {sorted(refused)[0]} is found in normalised text")
        return WordPieceTokenizer(_actions(of), passes, _word_pieces(of), codec)
    merges = _merges(of)
    if of.is_bytes:
        return ByteTokenizer(merges.byte_ids)
    passes, refused = added_tokens.passes(codec.tokenizer)
    return BytePairTokenizer(_words(of, refused), passes, merges, codec)


def _cached(
    of: Rules, kind: str, names: Iterable[str], make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    version = importlib.metadata.version("tokenizers")
    key = json.dumps([version, kind, *of.steps], sort_keys=True).encode()
    modules = (characters.__file__, byte_level.__file__)
    return table_cache.load_or_make(key, modules, names, make)


def _refusing(tokens: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of Words for `tokens`, whose texts are refused."""
    tables = added_tokens.table((token, 0) for token in tokens)
    return dict(zip(("tokens", "begins_token"), tables, strict=True))


def _actions(of: Rules) -> characters.Actions:
    make = functools.partial(characters.actions, of.normaliser, any(map(_decomposes, of.steps)))
    names = ("actions", "right_sides", "longest")
    return characters.Actions(**_cached(of, "WordPiece", names, make))


def _words(of: Rules, refused: Iterable[str]) -> byte_level.Words:
    def kinds() -> dict[str, Any]:
        kinds = characters.kinds()
        if of.normaliser:
            kinds[characters.changed_by(of.normaliser)] |= byte_level.CHANGES
        return {"kinds": kinds}

    assert of.places is not None
    places = {name: value for name, value in of.places.items() if name != "pattern"}
    return byte_level.Words(**_cached(of, "BPE", ["kinds"], kinds), **places, **_refusing(refused))


def _decomposes(step: Mapping[str, Any]) -> bool:
    if step["type"] == "BertNormalizer":
        strips = step.get("strip_accents")
        return step.get("lowercase", True) if strips is None else strips
    return step["type"] in _DECOMPOSES


def _word_pieces(of: Rules) -> word_pieces.Model:
    of_model = of.value["model"]
    vocab, prefix = of_model["vocab"], of_model["continuing_subword_prefix"]
    following = [
        (piece.removeprefix(prefix).encode(), number)
        for piece, number in vocab.items()
        if piece.startswith(prefix) and len(piece) > len(prefix)
    ]
    return word_pieces.Model(
        initial=trie.build((piece.encode(), id_) for piece, id_ in vocab.items() if piece),
        continuing=trie.build(following),
        unknown=vocab[of_model["unk_token"]],
        most_characters=of_model["max_input_chars_per_word"],
        ids=max(vocab.values()) + 1,
    )


def _merges(of: Rules) -> byte_pairs.Model:
    of_model = of.value["model"]
    vocab = of_model["vocab"]
    byte_ids = np.zeros(256, np.int32)
    for character, byte in alphabet().items():
        byte_ids[byte] = vocab[character]
    both = [each.split(" ") if isinstance(each, str) else each for each in of_model["merges"]]
    ids = [(vocab[left], vocab[right], vocab[left + right]) for left, right in both]
    left, right, merged = np.array(ids, np.int32).reshape(-1, 3).T.copy()
    return byte_pairs.Model(
        byte_ids=byte_ids,
        left=left,
        right=right,
        merged=merged,
        whole=trie.build(_spelt(vocab)) if of_model.get("ignore_merges") else None,
        ids=max(vocab.values()) + 1,
    )


def _spelt(vocab: Mapping[str, int]) -> Iterator[tuple[bytes, int]]:
    """Yields pieces that consist of bytes, spelt as in `byte_pairs.Model.whole`."""
    known = alphabet()
    halves = str.maketrans(
        {char: chr((byte >> 4) + 1) + chr((byte & 15) + 1) for char, byte in known.items()}
    )
    for piece, number in vocab.items():
        if piece and known.keys() >= {*piece}:
            yield piece.translate(halves).encode(), number
