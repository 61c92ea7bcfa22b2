"""SentencePiece vocabularies: ids, pieces, sentinels and the model's checksum."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator

import numpy as np

from tasks.storage import files, protobuf
from tasks.terminal.command_line import UserError

# The model's file in a vocabulary's folder and in a cache.
VOCABULARY = "sentencepiece.model"

# T5's ids. Source: T5's `sentencepiece.model` and seqio's SentencePieceVocabulary.
PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
# Not an id: it stands between the inputs and the targets of a pair's window.
PAIR_BORDER = -1
_UNK_END = UNK_ID + 1
# SentencePiece's mark for a space; the first piece of a word begins with it.
_SPACE = "\u2581"
# Kinds of pieces; 4 is user-defined, 5 is unused. Source: sentencepiece_model.proto, Type.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def sentinel_piece(number: int) -> str:
    """Returns the text of sentinel `number`, counted from 0: <extra_id_0> has the highest id."""
    return f"<extra_id_{number}>"


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """A vocabulary as objectives use it, without SentencePiece.

    Attributes:
      size: number of ids.
      sentinels: number of sentinels, which are the last ids.
      model: bytes of the SentencePiece model, parsed only if pieces are needed.
    """

    size: int
    sentinels: int
    model: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def first_sentinel(self) -> int:
        """The lowest id that is a sentinel; `size` if there are none."""
        return self.size - self.sentinels

    @functools.cached_property
    def pieces(self) -> list[str]:
        """Texts of the model's pieces, in the order of ids."""
        return [_piece_text(message) for message in _fields(self.model, 1)]

    @functools.cached_property
    def kinds(self) -> list[int]:
        """Kinds of the model's pieces, by id: NORMAL, UNKNOWN, CONTROL, BYTE, 4 or 5."""
        return [_piece_kind(message) for message in _fields(self.model, 1)]

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """Ids that begin a word, bool [size]: pieces that begin with a space, ids without text."""
        starts = np.ones(self.size, bool)
        text = self.pieces[_UNK_END : self.first_sentinel]
        starts[_UNK_END : _UNK_END + len(text)] = [piece.startswith(_SPACE) for piece in text]
        return starts

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """For each id the one whose text it has: itself. Inspection marks tokens by others."""
        return np.arange(self.size)

    def id_of(self, piece: str) -> int:
        """Returns the id of a piece or, for <extra_id_K>, of a sentinel.

        Raises:
          UserError: there is no such piece.
        """
        if piece not in self._ids:
            raise UserError(
                f"the vocabulary has no piece {piece}: make one with vocab.train "
                f"--user_defined_symbols={piece}, or let the objective use a sentinel, "
                f"<extra_id_0> to {sentinel_piece(self.sentinels - 1)}"
                if self.sentinels
                else f"the vocabulary has neither a piece {piece} nor sentinels: make one with "
                "vocab.train"
            )
        return self._ids[piece]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        sentinels = {sentinel_piece(number): number for number in range(self.sentinels)}
        return {
            **{piece: number for number, piece in enumerate(self.pieces)},
            **{piece: self.size - 1 - number for piece, number in sentinels.items()},
        }


def _fields(message: bytes, number: int) -> Iterator[bytes]:
    """Yields the payloads of the fields `number` of a protocol buffer."""
    for each, _, payload in protobuf.fields(memoryview(message)):
        if each == number:
            yield bytes(payload)


def _piece_text(message: bytes) -> str:
    """Returns the text of a SentencePiece message of a model."""
    return next(_fields(message, 1)).decode()


def _piece_kind(message: bytes) -> int:
    """Returns the kind of a SentencePiece message of a model; kinds take one byte."""
    return next((value[0] for value in _fields(message, 3)), NORMAL)


@dataclasses.dataclass(frozen=True)
class VocabularyRecord:
    """The vocabulary of a cache: ids below `pieces` are the model's, `extra_ids` more follow."""

    sha256: str
    pieces: int
    extra_ids: int
    sentinels: int

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.pieces + self.extra_ids


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A loaded vocabulary.

    Sentinel k is id `size - 1 - k`: either the model's own last pieces (as vocab.train writes them
    and T5X configures with `extra_ids = 0`) or ids added after the model's (`extra_ids > 0`).
    """

    model: bytes
    record: VocabularyRecord

    @property
    def size(self) -> int:
        """Number of ids, added sentinels included."""
        return self.record.size

    @property
    def first_sentinel(self) -> int:
        """The lowest id that is a sentinel; `size` if there are none."""
        return self.size - self.record.sentinels

    @functools.cached_property
    def ids(self) -> TokenIds:
        """The vocabulary as objectives use it."""
        return TokenIds(self.size, self.record.sentinels, self.model)

    @functools.cached_property
    def processor(self):
        """The sentencepiece.SentencePieceProcessor."""
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns ids of each text: int32[tokens], without EOS."""
        return [np.asarray(ids, np.int32) for ids in self.processor.encode(texts, out_type=int)]

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`; sentinels appear as <extra_id_k>, padding as nothing."""
        text: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if token >= self.first_sentinel:
                text += [self.processor.decode(run), sentinel_piece(self.size - 1 - token)]
                run = []
            elif token not in (PAD_ID, EOS_ID):
                run.append(token)
        return " ".join(part for part in [*text, self.processor.decode(run)] if part)


# Names of the SentencePiece model in folders of transformers: T5's, and Llama's.
_OF_TRANSFORMERS = ("spiece.model", "tokenizer.model")


def load(path: str, extra_ids: int = 0) -> Vocabulary:
    """Loads a vocabulary from a folder written by vocab.train, or from a SentencePiece .model file.

    Args:
      path: folder or file, local or any fsspec URL. A folder of transformers has spiece.model.
      extra_ids: number of sentinels to add after the model's pieces, for a model without any (100
        for the original T5 vocabulary).

    Raises:
      UserError: there is no such file, it is not a SentencePiece model, its ids are not T5's (pad
        0, eos 1), or the model has sentinels and `extra_ids` would add more.
    """
    model_path = path
    if path.endswith(".json"):
        raise UserError(
            f"{path} is not a SentencePiece model, which is all that can be read: name the "
            "folder's .model file, or train a vocabulary with vocab.train"
        )
    if not path.endswith(".model"):
        names = (VOCABULARY, *_OF_TRANSFORMERS)
        model_path = next(
            (found for name in names if files.exists(found := files.join(path, name))),
            files.join(path, VOCABULARY),
        )
    try:
        model = files.read_bytes(model_path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(
            f"no vocabulary at {model_path}: make one with vocab.train, or name a .model file"
        ) from error
    return from_bytes(model, extra_ids, model_path)


def from_bytes(model: bytes, extra_ids: int = 0, name: str = "the vocabulary") -> Vocabulary:
    """Does the same as `load` with the bytes of a model; `name` is its name in error messages."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
        pieces = processor.get_piece_size()
    except RuntimeError as error:
        raise UserError(f"{name} is not a SentencePiece model") from error
    if not pieces:
        raise UserError(f"{name} is not a SentencePiece model")
    if processor.pad_id() != PAD_ID or processor.eos_id() != EOS_ID:
        raise UserError(
            f"{name} has pad id {processor.pad_id()} and eos id {processor.eos_id()}; "
            "T5 needs 0 and 1 (SentencePiece's --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1)"
        )

    def last_piece(number: int) -> str:
        # mT5's sentinels begin with SentencePiece's mark for a space.
        return processor.id_to_piece(pieces - 1 - number).removeprefix(_SPACE)

    own = 0
    while own < pieces and last_piece(own) == sentinel_piece(own):
        own += 1
    if own and extra_ids:
        raise UserError(
            f"{name} ends in {own} sentinels of its own: leave out --extra_ids={extra_ids}"
        )
    record = VocabularyRecord(
        sha256=hashlib.sha256(model).hexdigest(),
        pieces=pieces,
        extra_ids=extra_ids,
        sentinels=own or extra_ids,
    )
    return Vocabulary(model, record)
