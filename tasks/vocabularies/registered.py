"""A user's class as a vocabulary, registered under a name by the module in --task_module.

    from tasks import vocabulary

    class Protein:
        pieces = ["<pad>", "</s>", "<unk>", *"ACDEFGHIKLMNPQRSTVWY"]

        def encode(self, text):
            return [self.pieces.index(each) if each in self.pieces[3:] else 2 for each in text]

        def decode(self, ids):
            return "".join(self.pieces[number] for number in ids)

    vocabulary.register("protein", Protein)

A cache stores the class's description as vocabulary.json, so ids, pieces and special ids need no
class; only text does. A checksum of the ids of some texts detects a changed class.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from tasks.terminal.command_line import UserError, nearest
from tasks.vocabularies.pieces import BYTE, CONTROL, NORMAL, T5_IDS, UNKNOWN, Pieces, SpecialIds

FILE = "vocabulary.json"
# The file's first bytes; no tokenizer.json begins like this.
_BEGIN = b'{"class": '
# Texts whose ids go into a class's checksum, along with its pieces.
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "ACDEFGHIKLMNPQRSTVWY acgtn 0123456789 (CC(=O)O)",
    "Ștefan a văzut șapte țări; Füße, naïve, Ωμέγα, 日本語, 😀",
    " two  spaces,\ttab\nline\n\n",
)
_PIECES_PROBED = 256
_ROLES = ("pad", "eos", "unk", "bos")


class OwnVocabulary(Protocol):
    """The interface of a registered class; `pieces`, `encode` and `decode` are required.

    Attributes:
      pieces: text that each id adds: str, or bytes if it may hold part of a character; for special
        pieces, their names. The last `sentinels` may have any text.
      special: ids with a role; by default T5's: padding 0, EOS 1, unknown 2. If EOS is None, one is
        added after the pieces.
      control: further ids without text, such as [MASK].
      sentinels: number of sentinels, the last ids; if 0, --extra_ids may add some.
      version: changes if `encode` does.
    """

    pieces: Sequence[str | bytes]
    special: SpecialIds = T5_IDS
    control: Collection[int] = ()
    sentinels: int = 0
    version: str = ""

    def encode(self, text: str) -> Sequence[int]:
        """Returns the ids of a text, without BOS and EOS; must be deterministic.

        An exception means that the text cannot be encoded: a build skips and counts it.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, which include no padding, EOS, BOS or sentinels."""


_factories: dict[str, Callable[[], OwnVocabulary]] = {}


def register(name: str, factory: Callable[[], OwnVocabulary]) -> None:
    """Registers a class or function for `--vocabulary=NAME`; raises ValueError for a bad name."""
    if not name.replace("_", "").replace("-", "").isalnum() or name == "bytes":
        raise ValueError(f"a vocabulary cannot be called {name!r}: use letters, digits, _ and -")
    _factories[name] = factory


def names() -> list[str]:
    """Returns the registered names."""
    return sorted(_factories)


def is_registered(model: bytes) -> bool:
    """Returns whether a vocabulary file describes a registered class."""
    return model.startswith(_BEGIN)


def describe(name: str) -> bytes:
    """Returns vocabulary.json for the class `name`; raises UserError if the class is invalid."""
    return _described(name, _made(name))


def _made(name: str) -> OwnVocabulary:
    try:
        return _factories[name]()
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"the vocabulary {name} cannot be made: {_of(error)}") from error


def _of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''}"


def _described(name: str, made: OwnVocabulary) -> bytes:
    def wrong(problem: str) -> UserError:
        return UserError(f"the vocabulary {name}, class {type(made).__name__}, {problem}")

    for needed in ("pieces", "encode", "decode"):
        if not hasattr(made, needed):
            raise wrong(f"has no {needed}: it needs pieces, encode and decode")
    pieces = list(made.pieces)
    if not pieces or not all(isinstance(piece, str | bytes) for piece in pieces):
        raise wrong("has pieces that are not a sequence of str or bytes, one for each id")
    special = getattr(made, "special", T5_IDS)
    if not isinstance(special, SpecialIds):
        raise wrong("has a `special` that is not a tasks.vocabulary.SpecialIds")
    roles = {role: getattr(special, role) for role in _ROLES}
    sentinels, control = getattr(made, "sentinels", 0), sorted(getattr(made, "control", ()))
    if not _is_id(sentinels, len(pieces) + 1):
        raise wrong(f"has {len(pieces)} pieces, but its number of sentinels is {sentinels!r}")
    plain = len(pieces) - sentinels
    for role, number in [*roles.items(), *(("control", number) for number in control)]:
        if not (_is_id(number, plain) or (number is None and role != "control")):
            raise wrong(
                f"has {role} as id {number!r}, but ids 0 to {plain - 1} for pieces other "
                "than sentinels: set its `special` ids"
            )
    value = {
        "class": name,
        "version": str(getattr(made, "version", "")),
        "special": roles,
        "control": control,
        "sentinels": sentinels,
        "pieces": [piece if isinstance(piece, str) else [piece.hex()] for piece in pieces],
        "ids_of_texts": _checksum(name, made, pieces[:plain]),
    }
    return json.dumps(value, ensure_ascii=False).encode()


def _is_id(number: Any, size: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < size


def _checksum(name: str, made: OwnVocabulary, pieces: Sequence[str | bytes]) -> str:
    """Returns the SHA-256 of the ids of some texts; unencodable texts contribute none."""
    known = [piece for piece in pieces if isinstance(piece, str)]
    chosen = known[:: -(-len(known) // _PIECES_PROBED) or 1]
    digest = hashlib.sha256()
    for text in (*_TEXTS, "".join(chosen), *chosen):
        found = _encoded(name, made, text, len(pieces))
        digest.update(b"none" if isinstance(found, str) else found.tobytes())
        digest.update(b";")
    return digest.hexdigest()


def _encoded(name: str, made: OwnVocabulary, text: str, size: int) -> np.ndarray | str:
    """Returns the ids of a text, int32 [tokens], or the reason it cannot be encoded."""
    try:
        found = made.encode(text)
    except Exception as error:  # the user's code may raise anything
        return f"{name} cannot encode it: {type(error).__name__}"
    try:
        ids = np.asarray(found)
        is_ids = ids.ndim == 1 and (not len(ids) or np.issubdtype(ids.dtype, np.integer))
    except ValueError:
        is_ids = False
    start = text[:60].replace("\n", " ")
    if not is_ids:
        raise UserError(
            f"the vocabulary {name}: encode returned {type(found).__name__} for the text "
            f"{start!r}, but must return a sequence of ids"
        )
    if len(ids) and not (ids.min() >= 0 and ids.max() < size):
        beyond = int(ids.max()) if ids.max() >= size else int(ids.min())
        raise UserError(
            f"the vocabulary {name}: encode returned the id {beyond} for the text {start!r}, but "
            f"ids of text are 0 to {size - 1}"
        )
    return ids.astype(np.int32)


def parsed(model: bytes, name: str = FILE) -> dict[str, Any]:
    """Parses a vocabulary.json; raises UserError if it is damaged. `name` is for messages."""
    try:
        value = json.loads(model)
        special, count = value["special"], len(value["pieces"])
        numbers = [value["sentinels"], *value["control"], *(special[role] for role in _ROLES)]
        if not all(number is None or _is_id(number, count + 1) for number in numbers):
            raise ValueError("an id is wrong")
        value["pieces"] = [
            piece if isinstance(piece, str) else bytes.fromhex(piece[0])
            for piece in value["pieces"]
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{name} is damaged: restore it from a copy, or build again") from error
    return value


def pieces(model: bytes) -> Pieces:
    """Returns the pieces of a vocabulary.json; sentinels are named <extra_id_K>."""
    value = parsed(model)
    every, roles = value["pieces"], value["special"]
    control = {roles["pad"], roles["eos"], roles["bos"], *value["control"]}
    first = len(every) - value["sentinels"]
    found = Pieces([], [], [])
    for number, piece in enumerate(every):
        name = piece if isinstance(piece, str) else _name(piece)
        kind, text = BYTE if isinstance(piece, bytes) and len(piece) == 1 else NORMAL, piece
        if number == roles["unk"]:
            kind = UNKNOWN
        elif number in control:
            kind, text = CONTROL, ""
        elif number >= first:
            name, kind, text = f"<extra_id_{len(every) - 1 - number}>", CONTROL, ""
        found.add(name, kind, text)
    return found


def _name(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in piece)


def special(model: bytes) -> tuple[SpecialIds, bool]:
    """Returns (special ids, whether there is an EOS; if not, EOS's id is -1)."""
    roles = {role: parsed(model)["special"][role] for role in _ROLES}
    eos = roles.pop("eos")
    return SpecialIds(eos=-1 if eos is None else eos, **roles), eos is not None


class RegisteredCodec:
    """The registered class that a vocabulary.json describes; `name` is for messages.

    Raises UserError at construction if the class is not registered or has changed.
    """

    def __init__(self, model: bytes, name: str):
        value = parsed(model, name)
        self.name, self._size = value["class"], len(value["pieces"]) - value["sentinels"]
        if self.name not in _factories:
            near = nearest(self.name, names())
            raise UserError(
                f"{name} is the vocabulary {self.name}{near}, a class that no module registered: "
                "name the module that does with --task_module"
            )
        self._own = _made(self.name)
        self.library = f"the class {type(self._own).__name__} of {self.name}"
        if (now := _described(self.name, self._own)) != model:
            before, after = parsed(model), parsed(now)
            parts = ", ".join(key for key in before if before[key] != after.get(key))
            raise UserError(
                f"the registered vocabulary {self.name} is not the one in {name}: they differ in "
                f"{parts}; register the earlier one, or build again in another folder"
            )

    def another(self) -> OwnVocabulary:
        return _made(self.name)

    def normalize(self, text: str) -> str:
        return text

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [tokens]; raises UserError if the class fails."""
        made = []
        for text in texts:
            found = self.try_encode(text)
            if isinstance(found, str):
                raise UserError(f"{found}: {text[:60]!r}")
            made.append(found)
        return made

    def try_encode(self, text: str, by: OwnVocabulary | None = None) -> np.ndarray | str:
        """Returns the ids of a text, int32 [tokens], or the reason the class cannot encode it."""
        return _encoded(self.name, by or self._own, text, self._size)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids; raises UserError if the class fails."""
        try:
            return self._own.decode(ids) if ids else ""
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"the vocabulary {self.name} cannot decode {ids[:8]}…: {_of(error)}"
            ) from error
