"""Trims vocabularies to the pieces that a corpus needs.

These are kept: pieces that occur in the corpus; special, byte, sentinel and user-defined pieces;
the single characters of kept pieces and of ASCII; and what those need:

    unigram     the piece with the lowest score, which sets the cost of an unknown character
    BPE         the pieces that merge into a kept one

Order and scores stay, so a text whose pieces are all kept is segmented as before. Unigram: the
best segmentation remains, and none is new. BPE: merges within a piece do not cross its borders and
are all kept, so the best pair is the same at every step. WordPiece: the longest match remains.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tasks.terminal.command_line import UserError
from tasks.vocabularies import tokenizer_json
from tasks.vocabularies.pieces import NORMAL
from tasks.vocabularies.sentencepiece_model import SPACE
from tasks.vocabulary import Vocabulary, VocabularyRecord, from_bytes

# TrainerSpec.ModelType in sentencepiece_model.proto.
_UNIGRAM, _BPE = 1, 2
_ASCII = frozenset(map(chr, range(33, 127)))
_BYTE_SPACE = "\u0120"  # GPT-2's character for a space


class Trimmed(NamedTuple):
    """A trimmed vocabulary, and the new id of each old id (None if dropped)."""

    vocabulary: Vocabulary
    id_map: list[int | None]


def trim(
    base: Vocabulary, counts: np.ndarray, min_count: int = 1, vocab_size: int | None = None
) -> Trimmed:
    """Trims `base` to pieces with `min_count` occurrences and the pieces they need.

    `counts` holds the occurrences of each id, int64 [size]. At most `vocab_size` pieces are kept,
    the most frequent, not counting sentinels. Raises UserError if the vocabulary is of an
    unsupported kind, `vocab_size` is too small, or no piece is dropped or kept for its occurrences.
    """
    rules = _sentencepiece(base) if base.is_sentencepiece else _tokenizer_json(base)
    kept = set(_always(base, rules))
    kinds = base.ids.kinds
    found = [token for token in np.flatnonzero(counts).tolist() if token < len(kinds)]
    # Frequent pieces first; ties by lower id.
    wanted = sorted(
        (token for token in found if counts[token] >= min_count and kinds[token] == NORMAL),
        key=lambda token: (-counts[token], token),
    )
    most = base.size if vocab_size is None else vocab_size + _own_sentinels(base)
    if len(kept) > most:
        raise UserError(
            f"--vocab_size={vocab_size} is too small: {len(kept) - _own_sentinels(base):,} pieces "
            "are always kept (special ones, bytes, ASCII characters)"
        )
    for token in wanted:
        more = {token, *rules.needs(token)} - kept
        if len(kept) + len(more) > most:
            break
        kept |= more
    if not any(token in kept for token in wanted):
        raise UserError(f"no piece of {base.name} occurs often enough in the corpus to be kept")
    ids = sorted(kept)
    count = base.record.pieces  # kinds may include an added EOS
    if len(ids) == count:
        raise UserError(f"every piece of {base.name} is kept: there is nothing to cut")
    new_ids: dict[int, int] = {old: new for new, old in enumerate(ids)}
    model = rules.cut(new_ids)
    new_ids |= {token: len(ids) + token - count for token in range(count, base.size)}
    made = _opened(base, model, new_ids)
    return Trimmed(made, [new_ids.get(token) for token in range(base.size)])


def _own_sentinels(base: Vocabulary) -> int:
    return base.record.sentinels - base.record.added_sentinels


def _opened(base: Vocabulary, model: bytes, new_ids: dict[int, int]) -> Vocabulary:
    """Returns the vocabulary of a trimmed model, with the special ids of `base`."""
    opened = from_bytes(model, base.record.added_sentinels, base.name)
    roles = dataclasses.asdict(base.special).items()
    special = dataclasses.replace(
        base.special, **{role: new_ids[token] for role, token in roles if token is not None}
    )
    record: VocabularyRecord = dataclasses.replace(
        opened.record,
        extra_ids=base.record.extra_ids,
        sentinels=base.record.sentinels,
        special=special if base.record.special else None,
    )
    return Vocabulary(model, record, base.name)


class _Rules(NamedTuple):
    """Rules for one kind of vocabulary."""

    always: set[int]  # ids kept whatever the corpus
    needs: Callable[[int], set[int]]  # id -> the ids required to find its piece in a text
    # {old id: new id} of kept pieces -> the bytes of the file with these alone.
    cut: Callable[[dict[int, int]], bytes]


def _always(base: Vocabulary, rules: _Rules) -> Iterable[int]:
    ids = base.ids
    special = {token for token in vars(base.special).values() if token is not None}
    for token, (name, kind) in enumerate(zip(ids.pieces, ids.kinds, strict=True)):
        if token >= base.record.pieces:
            break  # an added EOS
        plain = kind == NORMAL and token < base.first_sentinel and token not in special
        if not plain or token in rules.always or name in _ASCII or name in (SPACE, _BYTE_SPACE):
            yield token


def _characters(name: str, ids: dict[str, int], inner: str = "") -> set[int]:
    """Returns the ids of a piece's single characters, at the start of and within a word."""
    plain = name.removeprefix(inner) if inner else name
    made = {*plain, *(inner + each for each in plain)} if inner else set(plain)
    return {ids[each] for each in made if each in ids}


def _merged(
    symbols: list[str], rank: Callable[[str, str], float | None]
) -> tuple[list[str], list[str]]:
    """Returns (symbols after all merges, every piece made on the way)."""
    made = []
    while len(symbols) > 1:
        ranks = [
            (found, place)
            for place in range(len(symbols) - 1)
            if (found := rank(symbols[place], symbols[place + 1])) is not None
        ]
        if not ranks:
            break
        _, place = min(ranks)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        made.append(symbols[place])
    return symbols, made


def _sentencepiece(base: Vocabulary) -> _Rules:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(base.model)
    normal = {each.piece: token for token, each in enumerate(proto.pieces) if each.type == NORMAL}
    kind = proto.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise UserError(f"{base.name}: only unigram and BPE models of SentencePiece can be cut")

    def rank(left: str, right: str) -> float | None:
        token = normal.get(left + right)
        return None if token is None else -proto.pieces[token].score

    def needs(token: int) -> set[int]:
        name = proto.pieces[token].piece
        found = _characters(name, normal)
        if kind == _BPE:
            found |= {normal[each] for each in _merged(list(name), rank)[1]}
        return found

    def cut(new_ids: dict[int, int]) -> bytes:
        made = sentencepiece_model_pb2.ModelProto.FromString(base.model)
        del made.pieces[:]
        made.pieces.extend(proto.pieces[token] for token in new_ids)
        spec = made.trainer_spec
        spec.vocab_size = len(made.pieces)
        for name in ("unk_id", "bos_id", "eos_id", "pad_id"):
            setattr(spec, name, new_ids.get(getattr(spec, name), -1))
        return made.SerializeToString(deterministic=True)

    least = min(normal.values(), key=lambda token: proto.pieces[token].score, default=None)
    always = {least} if kind == _UNIGRAM and least is not None else set()
    return _Rules(always, needs, cut)


def _tokenizer_json(base: Vocabulary) -> _Rules:
    value = tokenizer_json.parsed(base.model)
    model = value["model"]
    kind = model.get("type", "BPE")
    ids: dict[str, int] = model["vocab"]
    names = {token: name for name, token in ids.items()}
    added = {each["id"] for each in value.get("added_tokens") or []}
    always = added | {held[at] for held, at in _template_ids(value.get("post_processor"))}
    inner = model.get("continuing_subword_prefix") or ""
    if kind not in ("BPE", "Unigram", "WordPiece", "WordLevel") or (kind == "BPE" and inner):
        raise UserError(f"{base.name}: a tokenizer.json of {kind} {inner} cannot be cut")
    if kind == "Unigram":
        scores = json.loads(base.model)["model"]["vocab"]
        always.add(min(range(len(scores)), key=lambda token: scores[token][1]))
    if tokenizer_json.is_byte_level(value):
        always |= {token for name, token in ids.items() if len(name) == 1}
    if kind == "WordPiece":
        always |= {ids[inner + each] for each in _ASCII if inner + each in ids}
    merges = [
        (tuple(each.split(" ")) if isinstance(each, str) else tuple(each), each)
        for each in model.get("merges") or ()
    ]
    ranks = {pair: number for number, (pair, _) in enumerate(merges)}
    suffix = model.get("end_of_word_suffix") or ""

    def rank(left: str, right: str) -> float | None:
        return ranks.get((left, right))

    def needs(token: int) -> set[int]:
        name = names.get(token, "").partition("\0")[0]
        found = _characters(name, ids, inner if kind == "WordPiece" else "")
        if kind == "BPE":
            plain = name.removesuffix(suffix) if suffix else name
            symbols = [*plain[:-1], plain[-1:] + name[len(plain) :]]
            made = [*symbols, *_merged(symbols[:], rank)[1]]
            found |= {ids[each] for each in made if each in ids}
        return found

    def cut(new_ids: dict[int, int]) -> bytes:
        made = json.loads(base.model)
        part = made["model"]
        if kind == "Unigram":
            part["vocab"] = [each for token, each in enumerate(part["vocab"]) if token in new_ids]
            if part.get("unk_id") is not None:
                part["unk_id"] = new_ids[part["unk_id"]]
        else:
            part["vocab"] = {
                name: new_ids[token] for name, token in part["vocab"].items() if token in new_ids
            }
        if kind == "BPE":
            part["merges"] = [
                each
                for (left, right), each in merges
                if {left, right, left + right} <= part["vocab"].keys()
            ]
        for each in made.get("added_tokens") or []:
            each["id"] = new_ids[each["id"]]
        for held, at in _template_ids(made.get("post_processor")):
            held[at] = new_ids[held[at]]
        return json.dumps(made, ensure_ascii=False).encode()

    return _Rules(always, needs, cut)


def _template_ids(part: Any) -> Iterator[tuple[list[Any], int]]:
    """Yields (list, place in it) of the ids in a post-processor (template, BERT's, RoBERTa's)."""
    if not isinstance(part, dict):
        return
    for step in part.get("processors") or ():
        yield from _template_ids(step)
    for token in (part.get("special_tokens") or {}).values():
        yield from ((token["ids"], place) for place in range(len(token["ids"])))
    yield from ((part[role], 1) for role in ("sep", "cls") if isinstance(part.get(role), list))


def described(base: Vocabulary, made: Trimmed, counts: np.ndarray) -> str:
    """Describes the number of kept ids and their share of the corpus's tokens."""
    kept = np.array([number is not None for number in made.id_map])
    share = counts[kept].sum() / counts.sum()
    return (
        f"{made.vocabulary.size:,} of {base.size:,} ids are kept, which make up {share:.4%} of "
        "the corpus's tokens"
    )
