"""Reads Hugging Face's tokenizer.json without importing `tokenizers`, except to encode and decode.

Supports byte-level BPE (GPT-2, Llama 3), BPE and Unigram with SentencePiece's mark for a space,
WordPiece and words. The file's decoder determines the text of a piece.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tasks.vocabularies import byte_level
from tasks.vocabularies.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, Pieces, SpecialIds
from tasks.vocabularies.sentencepiece_model import SPACE

FILE = "tokenizer.json"
# Name of the built-in vocabulary of bytes.
BYTES = "bytes"
# Transformers files that name special tokens; the first that names a token wins.
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
# SentencePiece's name of a byte.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_USER_DEFINED = 4
# Limit of the fast tokenizer's tries; lists of pieces are as long as the largest id.
LARGEST_ID = 2**24 - 2
# Names of special tokens if no transformers file gives them, the likeliest first.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "eos": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[SEP]", "[EOS]"),
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]", "[BOS]"),
}
# Keys of these tokens in transformers files: BERT's sequences begin with CLS and end with SEP.
_KEYS = {
    "pad": ("pad_token",),
    "eos": ("eos_token", "sep_token"),
    "bos": ("bos_token", "cls_token"),
    "unk": ("unk_token",),
}


def is_tokenizer_json(model: bytes) -> bool:
    """Returns whether vocabulary bytes are a tokenizer.json, not a SentencePiece model."""
    return model.lstrip()[:1] == b"{"


def parsed(model: bytes, name: str = FILE) -> dict[str, Any]:
    """Parses a tokenizer.json; raises UserError if it is invalid or has an id above LARGEST_ID."""
    try:
        value = json.loads(model)
        vocab = value["model"]["vocab"]
        value["model"].setdefault("type", _kind(value["model"]))
        is_list = value["model"]["type"] == "Unigram"
        value["model"]["vocab"] = _by_piece(vocab) if is_list else dict(vocab)
        ids = [*value["model"]["vocab"].values(), *(each["id"] for each in _added(value))]
        if not ids or not all(type(number) is int and number >= 0 for number in ids):
            raise ValueError("its ids are not whole numbers")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{name} is not a tokenizer.json of Hugging Face's tokenizers, or is damaged"
        ) from error
    if max(ids) > LARGEST_ID:
        raise UserError(
            f"{name} has the id {max(ids):,}, and a table would need that many rows: number its "
            f"ids without gaps, up to {LARGEST_ID:,}"
        )
    return value


def _kind(model: Mapping[str, Any]) -> str:
    """Returns the type of a model that does not state it (early versions of `tokenizers`)."""
    if isinstance(model["vocab"], list):
        return "Unigram"
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def _by_piece(vocab: Iterable[tuple[str, float]]) -> dict[str, int]:
    # A piece may occur twice; each of its ids counts.
    found: dict[str, int] = {}
    for number, (piece, _) in enumerate(vocab):
        found[piece if piece not in found else f"{piece}\0{number}"] = number
    return found


def _added(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    return value.get("added_tokens") or []


def pieces(model: bytes) -> Pieces:
    """Returns the pieces of a tokenizer.json; ids without a piece are UNUSED and nameless."""
    value = parsed(model)
    vocab, added = value["model"]["vocab"], _added(value)
    count = 1 + max([*vocab.values(), *(each["id"] for each in added)])
    names, kinds = [""] * count, [UNUSED] * count
    for piece, number in vocab.items():
        names[number], kinds[number] = piece.partition("\0")[0] or piece, NORMAL
    text = _text_rule(value)
    for number, name in enumerate(names if _falls_back(value) else ()):
        if _BYTE.fullmatch(name):
            kinds[number] = BYTE
    texts = [text(name) if kind != UNUSED else "" for name, kind in zip(names, kinds, strict=True)]
    for each in added:
        number, special = each["id"], each.get("special", False)
        names[number], kinds[number] = each["content"], CONTROL if special else _USER_DEFINED
        texts[number] = "" if special else each["content"]
    unknown = unknown_id(value)
    if unknown is not None:
        kinds[unknown], texts[unknown] = UNKNOWN, names[unknown]
    return Pieces(names, kinds, texts)


def _text_rule(value: Mapping[str, Any]) -> Callable[[str], str | bytes]:
    """Returns a function that maps a piece to the text it adds."""
    if is_byte_level(value):
        return byte_level.raw
    mark = value["model"].get("continuing_subword_prefix", "##")
    is_word_piece, falls_back = value["model"].get("type") == "WordPiece", _falls_back(value)

    def text(piece: str) -> str | bytes:
        if is_word_piece:
            return piece.removeprefix(mark) if mark and piece.startswith(mark) else f" {piece}"
        byte = falls_back and _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ")

    return text


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normalizer, pre-tokenizer or decoder; sequences are flattened."""
    if isinstance(part, Mapping):
        inner = [part.get(key) for key in ("decoders", "pretokenizers", "normalizers")]
        for steps in filter(None, inner):
            for step in steps:
                yield from _steps(step)
        yield part


def is_byte_level(value: Mapping[str, Any]) -> bool:
    """Returns whether pieces are written in GPT-2's byte alphabet."""
    steps = (step for part in ("decoder", "pre_tokenizer") for step in _steps(value.get(part)))
    return any(step.get("type") == "ByteLevel" for step in steps)


def _falls_back(value: Mapping[str, Any]) -> bool:
    return bool(value["model"].get("byte_fallback"))


def unknown_id(value: Mapping[str, Any]) -> int | None:
    """Returns the id of the unknown token of a `parsed` file."""
    model = value["model"]
    if model.get("type") == "Unigram":
        return model.get("unk_id")
    return _ids(value).get(model.get("unk_token"))


def settings(value: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the values in a `parsed` file of keys by which transformers' classes replace them."""
    found: dict[str, bool] = {}
    for step in _steps(value.get("normalizer")):
        if step.get("type") == "BertNormalizer":
            lowers, strips = step.get("lowercase", True), step.get("strip_accents")
            found["do_lower_case"] = lowers
            found["strip_accents"] = lowers if strips is None else strips
            found["tokenize_chinese_chars"] = step.get("handle_chinese_chars", True)
    for step in _steps(value.get("pre_tokenizer")):
        if step.get("type") == "ByteLevel":
            found["add_prefix_space"] = step.get("add_prefix_space", True)
    return found


def _ids(value: Mapping[str, Any]) -> dict[str | None, int]:
    return {**value["model"]["vocab"], **{each["content"]: each["id"] for each in _added(value)}}


def special(
    model: bytes, configs: Sequence[Mapping[str, Any]], name: str
) -> tuple[SpecialIds, bool]:
    """Returns (special ids, whether there is an EOS; if not, EOS's id is -1).

    `configs` are the contents of the files CONFIGS beside `model`; without them, the usual names
    are looked up. Raises UserError if the tokenizer lacks an unknown token that it needs, or draws
    ids at random, or a file names a token it lacks; messages call it `name`.
    """
    value = parsed(model, name)
    if rate := value["model"].get("dropout"):
        raise UserError(
            f"{name} uses BPE-dropout ({rate}), so a text is encoded differently each time: set "
            "dropout to null in that file"
        )
    ids, unknown = _ids(value), unknown_id(value)
    complete = is_byte_level(value) and all(char in ids for char in byte_level.alphabet())
    complete |= _falls_back(value) and all(f"<0x{byte:02X}>" in ids for byte in range(256))
    kind = value["model"].get("type", "BPE")
    if kind == "Unigram":  # it looks for the unknown token before it falls back to bytes
        usable = unknown is not None and 0 <= unknown < len(value["model"]["vocab"])
        complete &= not _falls_back(value)
    else:
        usable = value["model"].get("unk_token") in value["model"]["vocab"]
        complete &= kind == "BPE"
    if unknown is not None and not usable and not complete:
        raise UserError(
            f"{name} names an unknown token ({value['model'].get('unk_token', unknown)}) that its "
            "model's vocabulary lacks, so it cannot encode every text: train it again with one"
        )
    if unknown is None and not complete:
        raise UserError(
            f"{name} has neither an unknown token nor all 256 bytes, so it cannot encode every "
            "text: train it again with an unknown token (such as [UNK]) or with the byte alphabet"
        )
    found: dict[str, int | None] = {"pad": None, "eos": None, "bos": None, "unk": unknown}
    for role, keys in _KEYS.items():
        named = [(key, config[key]) for key in keys for config in configs if config.get(key)]
        for key, token in named[:1]:
            token = token["content"] if isinstance(token, Mapping) else str(token)
            lacks = token not in ids and role != "pad"
            if lacks or (role == "unk" and unknown not in (None, ids[token])):
                raise UserError(
                    f"{name} has {'no token' if lacks else 'another unknown token than'} "
                    f"{token}, which {' or '.join(CONFIGS)} beside it names as {key}: restore the "
                    "folder from a copy"
                )
            found[role] = ids.get(token)
        if not configs and role in _NAMES:
            found[role] = next((ids[each] for each in _NAMES[role] if each in ids), None)
    eos = found.pop("eos")
    return SpecialIds(eos=-1 if eos is None else eos, **found), eos is not None


class TokenizersCodec:
    """Hugging Face's `tokenizers` with a tokenizer.json; `name` is for messages.

    Raises UserError at construction if the package is missing or refuses the file.
    """

    library = "Hugging Face's tokenizers"

    def __init__(self, model: bytes, name: str):
        # Processes and threads divide the work, and the library's threads do not survive a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with extras.needed(name, "pipeline"):
            import tokenizers
        try:
            self.tokenizer = tokenizers.Tokenizer.from_buffer(model)
        except Exception as error:  # `tokenizers` raises no narrower class
            raise UserError(f"{name}: tokenizers cannot read it: {error}") from error
        # The file may set truncation and padding for a model.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._name, self._added = name, _added(json.loads(model))
        self._of_bytes = model == byte_level.byte_vocabulary()
        if self._of_bytes:
            self.library = "NumPy"

    def check_added(self) -> None:
        """Checks the ids of added tokens against the file; raises UserError if one differs.

        `tokenizers` numbers tokens that its model lacks from the model's size on.
        """
        for each in self._added:
            given, found = each["id"], self.tokenizer.token_to_id(each["content"])
            if given != found:
                raise UserError(
                    f"{self._name}: the added token {each['content']} has the id {given}, but "
                    f"tokenizers gives it {found}: number added_tokens in their order, without "
                    "gaps, from the size of the model's vocabulary on"
                )

    def normalize(self, text: str) -> str:
        rules = self.tokenizer.normalizer
        return rules.normalize_str(text) if rules else text

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [tokens], without BOS and EOS.

        Raises UserError if `tokenizers` fails, as it does if two added tokens strip the same white
        space.
        """
        if self._of_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3 for text in texts]
        try:
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:  # some errors of `tokenizers` are not Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if len(texts) > 1:  # to name the text
                return [self.encode([text])[0] for text in texts]
            raise UserError(
                f"{self._name}: tokenizers cannot encode the text {texts[0][:60]!r}: {error}"
            ) from error
        return [np.asarray(each.ids, np.int32) for each in found]

    def spans(self, text: str) -> list[tuple[int, str]]:
        """Returns the ids of a text, each with the part of the text that it stands for."""
        found = self.tokenizer.encode(text, add_special_tokens=False)
        places = zip(found.ids, found.offsets, strict=True)
        return [(token, text[begin:end]) for token, (begin, end) in places]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
