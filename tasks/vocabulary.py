"""Vocabularies of any kind: ids, pieces, sentinels and the file's checksum."""

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabularies import (
    byte_level,
    neighbours,
    registered,
    sentencepiece_model,
    tokenizer_json,
)
from tasks.vocabularies.pieces import BYTE, CONTROL, NORMAL, T5_IDS, UNKNOWN, UNUSED, SpecialIds
from tasks.vocabularies.registered import OwnVocabulary, RegisteredCodec, register
from tasks.vocabularies.sentencepiece_model import SentencePieceCodec
from tasks.vocabularies.token_ids import (
    ADDED_EOS,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    TokenIds,
    kind_of,
    sentinel_piece,
)
from tasks.vocabularies.tokenizer_json import TokenizersCodec

__all__ = [
    "BYTE",
    "CONTROL",
    "EOS_ID",
    "NORMAL",
    "PAD_ID",
    "T5_IDS",
    "UNKNOWN",
    "UNK_ID",
    "UNUSED",
    "OwnVocabulary",
    "SpecialIds",
    "TokenIds",
    "Vocabulary",
    "VocabularyRecord",
    "encode_with_sentinels",
    "from_bytes",
    "load",
    "register",
    "sentinel_piece",
]

# The SentencePiece model's file in a vocabulary's folder and in a cache.
VOCABULARY = sentencepiece_model.FILE
# Possible names of the file in a cache.
VOCABULARY_FILES = (VOCABULARY, tokenizer_json.FILE, registered.FILE)

_SENTINEL = re.compile(r"<extra_id_(0|[1-9][0-9]{0,8})>")
# Not an id: separates inputs from targets in a pair's window.
PAIR_BORDER = -1
# Forms of --vocabulary, for messages and help.
FORMS = (
    "a folder written by vocab.train or transformers, a SentencePiece .model file, a "
    f"tokenizer.json, {tokenizer_json.BYTES}, or a name that --task_module registers"
)


@dataclasses.dataclass(frozen=True)
class VocabularyRecord:
    """The vocabulary of a cache: ids below `pieces` are the file's; then come `extra_ids` more."""

    sha256: str  # of the vocabulary's file
    pieces: int  # number of ids in the file
    extra_ids: int  # number of added ids: an EOS if the file has none, then sentinels
    sentinels: int  # number of sentinels, added or the file's own
    file: str | None = None  # name of the file in the cache; None for VOCABULARY
    special: SpecialIds | None = None  # ids with a role; None for T5's

    @property
    def size(self) -> int:
        return self.pieces + self.extra_ids

    @property
    def added_sentinels(self) -> int:
        """Number of sentinels among `extra_ids`."""
        return self.extra_ids - (self.special_ids.eos == self.pieces)

    @property
    def file_name(self) -> str:
        return self.file or VOCABULARY

    @property
    def special_ids(self) -> SpecialIds:
        return self.special or T5_IDS

    def ids(self, model: bytes) -> TokenIds:
        """Returns the ids for objectives, given the bytes of the vocabulary's file."""
        return TokenIds(self.size, self.sentinels, model, self.special_ids)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A loaded vocabulary.

    Sentinel k is id `size - 1 - k`: either the file's own last pieces (as vocab.train writes them
    and T5X configures with `extra_ids = 0`) or ids added after the file's (`extra_ids > 0`).
    """

    model: bytes
    record: VocabularyRecord
    name: str = dataclasses.field(default="the vocabulary", compare=False)

    @property
    def size(self) -> int:
        return self.record.size

    @property
    def first_sentinel(self) -> int:
        return self.size - self.record.sentinels

    @property
    def special(self) -> SpecialIds:
        return self.record.special_ids

    @functools.cached_property
    def ids(self) -> TokenIds:
        return self.record.ids(self.model)

    def counts_agree(self) -> bool:
        """Returns whether the record's counts match the file."""
        pieces, record = kind_of(self.model).pieces(self.model).names, self.record
        sentinels = _own_sentinels(pieces) or record.added_sentinels
        return (record.pieces, record.sentinels) == (len(pieces), sentinels)

    def is_sentinel(self, name: str, token: int | None) -> bool:
        """Returns whether a name is a sentinel's, with this id if given.

        A vocabulary without sentinels of its own may get any: --extra_ids adds them.
        """
        if not (found := _SENTINEL.fullmatch(name.removeprefix(sentencepiece_model.SPACE))):
            return False
        given = self.record.sentinels == self.record.added_sentinels
        return given or token in (None, self.size - 1 - int(found[1]))

    @property
    def is_sentencepiece(self) -> bool:
        return kind_of(self.model) is sentencepiece_model

    @functools.cached_property
    def is_unigram(self) -> bool:
        """Whether it is a unigram model of SentencePiece, whose releases have several laws."""
        return self.is_sentencepiece and sentencepiece_model.is_unigram(self.model)

    @property
    def is_registered(self) -> bool:
        return kind_of(self.model) is registered

    @functools.cached_property
    def codec(self) -> Any:
        """The encoder and decoder, one of _CODECS."""
        return _CODECS[kind_of(self.model)](self.model, self.name)

    @property
    def processor(self) -> Any:
        """The sentencepiece.SentencePieceProcessor; raises UserError for other vocabularies."""
        if not isinstance(self.codec, SentencePieceCodec):
            kind = "a class of --task_module" if self.is_registered else "a tokenizer.json"
            raise UserError(f"{self.name} is {kind}, but this needs a SentencePiece model")
        return self.codec.processor

    @functools.cached_property
    def piece_bytes(self) -> np.ndarray:
        """Int32 [size], UTF-8 bytes of the text that each piece adds, without white space.

        They are 0 for the unknown piece; texts hold no special pieces but sentinels.
        """
        texts: Sequence[str | bytes]
        if isinstance(self.codec, SentencePieceCodec):  # which is faster than to parse its file
            texts = [name.replace(sentencepiece_model.SPACE, " ") for name in self.codec.names()]
        else:
            texts = self.ids.texts
        raw = [
            "".join(text.split()).encode() if isinstance(text, str) else b"".join(text.split())
            for text in texts[: self.first_sentinel]
        ]
        raw += [sentinel_piece(self.size - 1 - n).encode() for n in range(len(raw), self.size)]
        table = np.fromiter(map(len, raw), np.int32, self.size)
        if self.special.unk is not None:
            table[self.special.unk] = 0
        return table

    @functools.cached_property
    def reserved(self) -> np.ndarray:
        """Bool [size], True for ids not allowed in text: sentinels and spellable control pieces."""
        found = np.arange(self.size) >= self.first_sentinel
        if not self.is_sentencepiece:
            found[: len(self.ids.kinds)] |= np.array(self.ids.kinds) == CONTROL
        return found

    def special_pieces(self) -> dict[str, str]:
        """Returns role -> piece name, for "pad", "eos", "unk" and "bos"."""
        roles = dataclasses.asdict(self.special).items()
        return {role: self.piece(token) for role, token in roles if token is not None}

    def piece(self, token: int) -> str:
        """Returns the name of a piece, or of an added EOS or sentinel."""
        if token >= self.first_sentinel:
            return sentinel_piece(self.size - 1 - token)
        return self.ids.pieces[token]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [tokens], without BOS and EOS."""
        return self.codec.encode(texts)

    def try_encode(self, text: str) -> np.ndarray | str:
        """Returns the ids of a text, int32 [tokens], or why a user's class cannot encode it."""
        if isinstance(self.codec, RegisteredCodec):
            return self.codec.try_encode(text)
        return self.codec.encode([text])[0]

    def unknown_text(self, text: str) -> str:
        """Returns the parts of a text that unknown tokens stand for; all of it if nobody knows."""
        if self.is_registered:
            return text
        spans = self.codec.spans(text)
        return "".join(part for token, part in spans if token == self.special.unk)

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`; sentinels appear as <extra_id_k>, and padding is omitted."""
        left_out = {self.special.pad, self.special.eos, self.special.bos}
        kept = [token for token in map(int, ids) if token not in left_out]
        text: list[str] = []
        for above, group in itertools.groupby(kept, lambda token: token >= self.first_sentinel):
            run = list(group)
            text += map(self.piece, run) if above else [self.codec.decode(run)]
        return " ".join(filter(None, text))


def encode_with_sentinels(
    vocabulary: Vocabulary, text: str, encode: Callable[[str], np.ndarray] | None = None
) -> np.ndarray:
    """Returns the ids of a text, int32 [tokens], without EOS; <extra_id_k> becomes a sentinel.

    `encode` returns the ids of text without sentinels; by default the vocabulary's library.

    Drops the space before a sentinel, which belongs to the span's first token. Text after a
    sentinel without a space continues the word if the vocabulary has such a piece. Raises UserError
    if the vocabulary lacks the sentinel.
    """
    encode = encode or (lambda part: vocabulary.encode([part])[0])
    # Texts are at even places, sentinel numbers at odd ones.
    parts = _SENTINEL.split(text)
    ids: list[int] = []
    for place, part in enumerate(parts):
        if place % 2:
            ids.append(_sentinel(vocabulary, int(part)))
            continue
        if place < len(parts) - 1:
            part = part.removesuffix(" ")
        own = encode(part).tolist() if part else []
        if place and own and not part[0].isspace():
            own = _without_space(vocabulary, own)
        ids += own
    return np.asarray(ids, np.int32)


def _sentinel(vocabulary: Vocabulary, number: int) -> int:
    count = vocabulary.record.sentinels
    if number >= count:
        which = f"{sentinel_piece(0)} to {sentinel_piece(count - 1)}" if count else "no sentinels"
        raise UserError(f"the vocabulary has no {sentinel_piece(number)}: it has {which}")
    return vocabulary.size - 1 - number


def _without_space(vocabulary: Vocabulary, ids: list[int]) -> list[int]:
    """Returns ids without the space that SentencePiece puts before a text."""
    first = vocabulary.piece(ids[0])
    if first == sentencepiece_model.SPACE:
        return ids[1:]
    known = vocabulary.ids.find(first.removeprefix(sentencepiece_model.SPACE))
    return ids if known is None else [known, *ids[1:]]


_CODECS: dict[Any, Any] = {
    registered: RegisteredCodec,
    tokenizer_json: TokenizersCodec,
    sentencepiece_model: SentencePieceCodec,
}


def load(path: str, extra_ids: int = 0) -> Vocabulary:
    """Loads a vocabulary of any kind.

    Args:
      path: a SentencePiece .model file, a tokenizer.json, or a folder written by vocab.train or
        transformers, local or at any fsspec URL; "bytes" for ByT5's ids; or the name of a
        registered class, which takes precedence over a folder.
      extra_ids: number of sentinels to add to a vocabulary without any (100 for the original T5
        vocabulary).

    Raises UserError if there is no such vocabulary, it lacks an unknown token, `extra_ids` is
    negative, the vocabulary already has sentinels, or another file of its folder has other tokens.
    """
    if extra_ids < 0:
        raise UserError(f"--extra_ids must be 0 or more, not {extra_ids}")
    if path == tokenizer_json.BYTES:
        return from_bytes(byte_level.byte_vocabulary(), extra_ids, path)
    if path in registered.names():
        return from_bytes(registered.describe(path), extra_ids, path)
    is_file = path.endswith((".model", ".json"))
    place = path if is_file else neighbours.chosen(path)
    try:
        model = files.read_bytes(place)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        known = ", ".join(registered.names())
        more = f"; registered: {known}" if known else ""
        if not path.startswith((".", "/")) and "://" not in path:
            more += "; a name on the Hugging Face Hub is not fetched: hf download it into a folder"
        raise UserError(
            f"no vocabulary at {place}: make one with vocab.train, or name {FORMS}{more}"
        ) from error
    configs = []
    if place.endswith(".json") and not registered.is_registered(model):
        if not tokenizer_json.is_tokenizer_json(model):
            raise UserError(f"{place} is not a tokenizer.json: a vocabulary is {FORMS}")
        configs = neighbours.configs(place)
    loaded = _loaded(model, extra_ids, place, configs)
    if not is_file and not loaded.is_registered:
        if neighbours.are_there(place):
            neighbours.check(place, kind_of(model).pieces(model), loaded.is_sentinel)
        if configs:
            neighbours.check_settings(place, model, configs)
        if loaded.is_sentencepiece:
            neighbours.compare_ids(place, loaded.encode, loaded.special.unk)
    return loaded


def from_bytes(model: bytes, extra_ids: int = 0, name: str = "the vocabulary") -> Vocabulary:
    """Loads a vocabulary from the bytes of its file; `name` is for messages."""
    return _loaded(model, extra_ids, name, [])


def of_cache(folder: str, record: VocabularyRecord, command: str = "build") -> Vocabulary:
    """Loads the vocabulary of a cache or a run; raises UserError if its file is missing or differs.

    `command` is the one that made the cache, for messages; "" for a run.
    """
    path = files.join(folder, record.file_name)
    again = f"run pipeline.{command} again, which rewrites it" if command else "restore it"
    try:
        model = files.read_bytes(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {again}") from error
    found = hashlib.sha256(model).hexdigest()
    if found != record.sha256:
        raise UserError(
            f"{path} is damaged: its sha256 is {found}, but it was made with "
            f"{record.sha256}: {again}"
        )
    return Vocabulary(model, record, path)


def _loaded(model: bytes, extra_ids: int, name: str, configs: list[dict[str, Any]]) -> Vocabulary:
    """Loads `model`; `configs` are the transformers files beside it."""
    kind = kind_of(model)
    codec: SentencePieceCodec | TokenizersCodec | None = None
    if kind is registered:
        special, ends = registered.special(model)
    elif kind is tokenizer_json:
        special, ends = tokenizer_json.special(model, configs, name)
        codec = TokenizersCodec(model, name)
    else:
        codec = SentencePieceCodec(model, name)
        special, ends = codec.special()
    pieces = codec.names() if isinstance(codec, SentencePieceCodec) else kind.pieces(model).names
    own = _own_sentinels(pieces)
    if own and extra_ids:
        raise UserError(
            f"{name} ends in {own} sentinels of its own: leave out --extra_ids={extra_ids}"
        )
    if not own and sentinel_piece(0) in pieces:
        _refuse_order(name, pieces, pieces.index(sentinel_piece(0)))
    if isinstance(codec, TokenizersCodec):
        codec.check_added()
    if not ends:
        if own:
            raise UserError(
                f"{name} has sentinels but no EOS: train it again with one, such as {ADDED_EOS}"
            )
        special = dataclasses.replace(special, eos=len(pieces))
    record = VocabularyRecord(
        sha256=hashlib.sha256(model).hexdigest(),
        pieces=len(pieces),
        extra_ids=extra_ids + (not ends),
        sentinels=own or extra_ids,
        file=None if kind is sentencepiece_model else kind.FILE,
        special=None if special == T5_IDS else special,
    )
    loaded = Vocabulary(model, record, name)
    if codec:
        vars(loaded)["codec"] = codec
    return loaded


def _refuse_order(name: str, pieces: list[str], first: int) -> NoReturn:
    """Raises UserError because sentinels are not the last ids; <extra_id_0> has the id `first`."""
    says = f"{name} has {sentinel_piece(0)} as id {first}, and sentinels must be the last ids, "
    if _own_sentinels(pieces[: first + 1]) < 2:
        raise UserError(
            f"{says}and that one the very last. In a copy of it, give these pieces other names (in "
            "tokenizer.json, wherever they occur), and add sentinels with --extra_ids; a model "
            "trained with the old ones has to learn the new ones"
        )
    raise UserError(
        f"{says}but {pieces[first + 1]} and perhaps others were added after them. Take the "
        "vocabulary from before that, which spells these in other pieces, or make one that has "
        "them with vocab.train --user_defined_symbols"
    )


def _own_sentinels(pieces: list[str]) -> int:
    """Returns how many of the last pieces are sentinels, in descending order."""
    for own, piece in enumerate(reversed(pieces)):
        # mT5's sentinels begin with SentencePiece's mark for a space.
        if piece.removeprefix(sentencepiece_model.SPACE) != sentinel_piece(own):
            return own
    return len(pieces)
