"""Unigram models of a tokenizer.json in compiled code, with the ids of Hugging Face's `tokenizers`.

Its law is another than SentencePiece's. Words are cut at spaces before they are encoded, scores are
summed in float64 from a word's start, and unknown characters are one piece only within a word. The
normaliser's rules replace graphemes, by the shortest rule that begins one, or single characters.
"""

import base64
import functools
import importlib.metadata
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.native import build
from pipeline.tokenizer import added_tokens, fast_tokenizer, table_cache, trie
from pipeline.tokenizer.word_tokenizer import Unsupported
from tasks.vocabularies import tokenizer_json
from tasks.vocabularies.sentencepiece_model import LAWS, SPACE

LAW = len(LAWS)  # WORD_LAW of pipeline/native/sentencepiece.c
# Of Normaliser.points and Normaliser.prefix; see pipeline/native/normalise.h.
_BEGINS, _JOINS, _LONE, _HARD = 1, 2, 4, 8
_IF_MISSING = 2
_POINTS = 0x110000
_NO_RULE = -2  # in Normaliser.ascii
# What an unknown character scores less than the lowest piece. Source: huggingface/tokenizers,
# `models/unigram/model.rs`, K_UNK_PENALTY.
_UNKNOWN_PENALTY = 10.0
# White space of Rust's `char::is_whitespace`.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)

_COLLAPSING = [
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": content}
    for content in (" ", SPACE)
]

_Steps = Sequence[Mapping[str, Any]]


def spacing(value: Mapping[str, Any], normalisers: _Steps, cutters: _Steps) -> dict[str, Any]:
    """Returns "charsmap" and the Normaliser's fields of spaces; raises Unsupported."""
    found: dict[str, Any] = {
        "charsmap": b"",
        **dict.fromkeys(("collapse", "strip_left", "strip_right"), False),
        "prefix": _IF_MISSING,
        "splits": False,
    }
    marks = False  # whether repeated spaces are marks now, which are no white space
    for number, step in enumerate(normalisers):
        if step["type"] == "Precompiled" and not number:
            found["charsmap"] = base64.b64decode(step["precompiled_charsmap"])
        elif step["type"] == "Strip" and not marks:
            found["strip_left"] |= step.get("strip_left", True)
            found["strip_right"] |= step.get("strip_right", True)
        elif step in _COLLAPSING:
            found["collapse"], marks = True, step["content"] == SPACE
        else:
            raise Unsupported(f"its model is Unigram, but its normalizer {step['type']}")
    if [cutter["type"] for cutter in cutters] == ["WhitespaceSplit", "Metaspace"] and not marks:
        found |= {"collapse": True, "strip_left": True, "strip_right": True, "splits": True}
    elif [cutter["type"] for cutter in cutters] != ["Metaspace"]:
        names = ", ".join(cutter["type"] for cutter in cutters)
        raise Unsupported(f"its model is Unigram, but its pre-tokenizer {names or 'none'}")
    elif (found["strip_left"] or found["strip_right"]) and not found["collapse"]:
        raise Unsupported("its normalizer strips spaces, but keeps repeated ones")
    last = cutters[-1]
    old = "always" if last.get("add_prefix_space", True) else "never"
    scheme = last.get("prepend_scheme", old)
    if (
        last["replacement"] != SPACE
        or not last.get("split", True)
        or (scheme != "always" and (scheme != "never" or found["splits"]))
    ):
        raise Unsupported("its pre-tokenizer Metaspace does not cut words that begin with spaces")
    if scheme == "never":
        found["prefix"] = 0
    return found


def check(value: Mapping[str, Any], normaliser: Any) -> None:
    """Raises Unsupported unless the pieces and added tokens of a tokenizer.json are supported.

    `normaliser`: the library's object, or None.
    """
    model = value["model"]
    pieces, unknown = [*model["vocab"]], model.get("unk_id")
    if unknown is None:
        raise Unsupported("its vocabulary lacks the unknown token")
    if any("\0" in piece for piece in pieces):
        raise Unsupported("a piece has a zero byte, or is there twice")
    text = pieces[unknown]
    if not text or sum(text in piece for piece in pieces) > 1:
        raise Unsupported("its unknown token is part of other pieces")
    bytes_ = (f"<0x{byte:02X}>" for byte in range(256))
    if model.get("byte_fallback") and any(byte not in model["vocab"] for byte in bytes_):
        raise Unsupported("its vocabulary lacks a byte")
    for content in _late_tokens(value):
        if not set(content).isdisjoint(_WHITE + SPACE):
            raise Unsupported(f"its added token {content!r}, found in normalised text, has a space")
        if normaliser and normaliser.normalize_str(content) != content:
            raise Unsupported(f"its normalizer changes the added token {content}")


def _late_tokens(value: Mapping[str, Any]) -> Iterator[str]:
    """Yields texts whose documents are refused: tokens that are looked up in normalised text."""
    for token in value.get("added_tokens") or ():
        if token.get("normalized", not token.get("special", False)):
            yield token["content"]
    if value["model"].get("byte_fallback"):  # a piece of text, but not in the midst of unknown text
        yield [*value["model"]["vocab"]][value["model"]["unk_id"]]


def tokenizer(
    value: Mapping[str, Any], spaces: Mapping[str, Any], codec: tokenizer_json.TokenizersCodec
) -> fast_tokenizer.FastTokenizer:
    """Makes the tokenizer of a `parsed` tokenizer.json; raises Unsupported."""
    late = dict.fromkeys(_late_tokens(value), 0)
    make = functools.partial(_tables, spaces, late, codec)
    version = importlib.metadata.version("tokenizers")
    key = json.dumps([version, value], sort_keys=True).encode()
    modules = (*map(str, build.sources()), trie.__file__, fast_tokenizer.__file__, __file__)
    names = fast_tokenizer.Tables._fields
    tables = fast_tokenizer.Tables(**table_cache.load_or_make(key, modules, names, make))
    passes, _ = added_tokens.passes(codec.tokenizer)
    if late:
        nothing = added_tokens.table([])
        passes.append(added_tokens.Added(*nothing, *added_tokens.table(late.items())))
    return fast_tokenizer.FastTokenizer(tables, codec, passes)


def _tables(spaces: Mapping[str, Any], late: Mapping[str, int], codec: Any) -> dict[str, Any]:
    # As the library reads them: its parser of JSON rounds some scores differently from Python's.
    model = json.loads(codec.tokenizer.to_str())["model"]
    unknown = model["unk_id"]
    given = np.array([score for _, score in model["vocab"]], np.float64)
    lowest = float(given.min())
    if not math.isfinite(lowest) or not lowest <= 0 >= given[unknown]:
        raise Unsupported("its unknown token has a positive score, or all pieces have one")
    if len(given) > tokenizer_json.LARGEST_ID:
        raise Unsupported(f"it has {len(given)} pieces")
    pieces = [
        (piece.replace(SPACE, " "), number)
        for number, (piece, _) in enumerate(model["vocab"])
        # Words have no spaces but at their start.
        if piece and " " not in piece and SPACE not in piece[1:]
    ]
    if not pieces:
        raise Unsupported("it has no pieces")
    ids = {piece: number for number, (piece, _) in enumerate(model["vocab"])}
    falls_back = bool(model.get("byte_fallback"))
    of_bytes = [ids[f"<0x{byte:02X}>"] if falls_back else 0 for byte in range(256)]
    return {
        **_normaliser(spaces),
        "kind": fast_tokenizer.UNIGRAM,
        "law": LAW,
        "trie": trie.build((piece.encode(), number) for piece, number in pieces),
        "frozen": trie.build([]),
        "scores": given,
        "unknown_score": lowest - _UNKNOWN_PENALTY,
        "unknown_id": unknown,
        "byte_ids": np.array(of_bytes, np.int32),
        "has_bytes": falls_back,
        "cost": 0.0,
        **fast_tokenizer.pairs([piece for piece, _ in pieces]),
        **dict(zip(("tokens", "begins_token"), added_tokens.table(late.items()), strict=True)),
    }


def _normaliser(spaces: Mapping[str, Any]) -> dict[str, Any]:
    rules, right_sides = fast_tokenizer.charsmap(spaces["charsmap"])
    shown = right_sides.tobytes().decode()
    if not set(shown).isdisjoint(_WHITE.replace(" ", "") + SPACE):
        raise Unsupported("its normalizer writes white space other than spaces")
    found = {
        "rules": rules,
        "right_sides": right_sides,
        "ascii": np.zeros(128, np.int16),
        "points": np.zeros(_POINTS, np.uint8),
        "symbols": trie.build([]),
        "begins_symbol": np.zeros(256, np.uint8),
        "longest": fast_tokenizer.longest(right_sides),
        **{name: spaces[name] for name in ("collapse", "strip_left", "strip_right", "prefix")},
        "suffix": False,
        "graphemes": True,
    }
    fast_tokenizer.fill_tables(found)
    ascii_, points = found["ascii"], found["points"]
    points &= _BEGINS
    for flag, characters in _graphemes().items():
        points[[ord(each) for each in characters]] |= flag
    hard = [ord(SPACE)]
    if spaces["strip_left"] or spaces["strip_right"]:
        kept = [ord(each) for each in _WHITE if each != " " and not _has_rule(found, each)]
        hard += kept
        if spaces["splits"]:
            ascii_[[point for point in kept if point < 128]] = ord(" ")
        else:
            ascii_[[point for point in kept if point < 128]] = _NO_RULE
    if not (spaces["collapse"] and ascii_[ord("\r")] == ascii_[ord("\n")] == ord(" ")):
        ascii_[ord("\r")] = _NO_RULE
    points[hard] |= _BEGINS | _HARD
    points[points & _HARD > 0] |= _BEGINS
    return found


def _has_rule(found: Mapping[str, Any], character: str) -> bool:
    point = ord(character)
    if point < 128:
        return bool(found["ascii"][point] != point)
    return bool(found["points"][point] & _BEGINS)


@functools.cache
def _graphemes() -> dict[int, str]:
    """Returns the characters with each flag but _BEGINS, found by experiment with the library."""
    from tokenizers import normalizers

    detector = normalizers.Precompiled(_detector())
    every = [chr(point) for point in range(1, _POINTS) if not 0xD800 <= point < 0xE000]
    # These separate graphemes below.
    every = [each for each in every if each not in "\n\r"]

    def joined(form: str) -> list[bool]:
        shown = detector.normalize_str("\n".join(form.replace("?", each) for each in every))
        return [each == "X" for each in shown.split("\n")]

    after, before, mark = map(joined, ("a?", "?a", "?\u0301"))
    return {
        _JOINS: "".join(each for each, found in zip(every, after, strict=True) if found),
        _HARD: "".join(each for each, found in zip(every, before, strict=True) if found),
        # Graphemes of six bytes show nothing.
        _LONE: "\0\n\r"
        + "".join(
            each
            for each, found in zip(every, mark, strict=True)
            if not found and len(each.encode()) < 4
        ),
    }


def _detector() -> bytes:
    """Returns a charsmap that makes X of every character, but of a line's end."""
    # Darts-clone's units: a byte, whether a value follows, and the place of the bytes after it.
    last, value = 256, 5 * 256  # where the bytes before the end are, and the value
    units = np.zeros(value + 256, np.uint32)

    def put(place: int, byte: int, to: int, ends: bool = False) -> None:
        units[place ^ byte] = byte | ends << 8 | (place ^ byte ^ to) << 10

    first = 4 * 256
    units[0] = first << 10
    for byte in range(1, 0xF8):
        if byte < 0x80 and byte != ord("\n"):
            put(first, byte, value, ends=True)
        elif byte >= 0xC0:
            following = 1 + (byte >= 0xE0) + (byte >= 0xF0)
            put(first, byte, last * following)
    for byte in range(0x80, 0xC0):
        put(last, byte, value, ends=True)
        put(2 * last, byte, last)
        put(3 * last, byte, 2 * last)
    units[value] = 1 << 31
    return units.nbytes.to_bytes(4, "little") + units.tobytes() + b"X\0"
