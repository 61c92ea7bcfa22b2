"""Writes a vocabulary as a tokenizer.json for Hugging Face's `tokenizers`.

An existing tokenizer.json is kept, plus EOS and sentinels. A SentencePiece model is converted.
`compare` measures how many texts get equal ids, since `tokenizers` differs from SentencePiece:

- It sums unigram scores in float64, without rounding to float32 after every piece, so it may choose
  the other of two segmentations with almost equal scores, most often in a run of one character.
- It sorts combining marks into canonical order, and composes marks after a ligature, such as ﬁ,
  with the ligature's last letter.
- It recognises the special tokens `</s>`, `<pad>` and `<extra_id_0>` anywhere in a text.
- It writes no space symbol before the first word of a text that begins with a character that
  normalisation removes, or that is a user-defined symbol and nothing else. It writes one between a
  special token and a user-defined symbol that follows it.
- In BPE it orders merges that yield the same piece.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tasks.terminal.command_line import UserError
from tasks.vocabulary import BYTE, NORMAL, Vocabulary, sentinel_piece

SPIECE = "spiece.model"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_SPACE = "\u2581"
# TrainerSpec.ModelType in sentencepiece_model.proto. `tokenizers` has no word or char models.
_UNIGRAM, _BPE = 1, 2
_USER_DEFINED = 4
# A noncharacter: absent from texts and rules, and a barrier to composition.
_BREAK = "\ufdd0"
# SentencePiece's nmt rules apply all NFKC replacements but the fullwidth tilde's.
_TILDE, _KEPT_TILDE = "\uff5e", "\ufdd1"
# Stand for a user-defined symbol while the text around it is normalised: its number, in digits that
# are noncharacters, between two marks.
_MARK = "\ufdd2"
_DIGITS = {ord("0") + digit: 0xFDD3 + digit for digit in range(10)}
# Characters that extend a grapheme: marks, joiners, skin tone modifiers.
_EXTENDS = r"[\p{M}\x{200C}\x{200D}\x{1F3FB}-\x{1F3FF}]"
# Canonical order sorts the marks after a letter by class; SentencePiece does not. Only Arabic and
# Hebrew marks are commonly written in a different order.
_UNSORTED_MARKS = r"[\u0591-\u05C7\u0610-\u061A\u064B-\u065F\u0670\u06D6-\u06ED]"

# Scores closer than this count as equal, since SentencePiece rounds sums to float32.
_TIE = 1e-3


class Match(NamedTuple):
    """A comparison with the `library` used in training, on a number of `texts`.

    `ties` counts the `different` texts whose two segmentations have equal scores: both are correct.
    They are the last ones.
    """

    texts: int
    different: list[str]
    ties: int = 0
    library: str = "SentencePiece"

    @property
    def other(self) -> int:
        """Number of `different` texts without `ties`."""
        return len(self.different) - self.ties


@dataclasses.dataclass(frozen=True)
class Roles:
    """The piece that `begins` texts, whether EOS `ends` them, and an encoder's `mask` piece.

    `types`: an encoder distinguishes the segments of a pair by token type.
    """

    begins: str = ""
    ends: bool = True
    mask: str = ""
    types: bool = True

    @property
    def typed(self) -> bool:
        """True if token types number the segments of a pair."""
        return bool(self.mask) and self.types


def tokenizer_json(vocabulary: Vocabulary, roles: Roles = Roles()) -> str:
    """Returns the contents of tokenizer.json; sentinels absorb preceding white space."""
    from tokenizers import AddedToken, Tokenizer, processors

    if vocabulary.is_sentencepiece:
        tokenizer, symbols = _converted(vocabulary)
    else:
        tokenizer, symbols = Tokenizer.from_buffer(vocabulary.model), []
        tokenizer.no_truncation()
        tokenizer.no_padding()
    special = vocabulary.special_pieces()
    sentinels = [sentinel_piece(number) for number in range(vocabulary.record.sentinels)]
    known = [] if vocabulary.is_sentencepiece else [*tokenizer.get_added_tokens_decoder().values()]
    # Existing tokens keep their rules; for example, BERT's [MASK] absorbs spaces.
    new = dict.fromkeys(special.values(), None).keys() - {token.content for token in known}
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False) for name in special.values() if name in new]
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, lstrip=True, normalized=False) for name in reversed(sentinels)]
    )
    tokenizer.add_tokens([AddedToken(symbol, normalized=True) for symbol in symbols])
    eos = special["eos"]
    first = f"{roles.begins} " if roles.begins else ""
    last = f" {eos}" if roles.ends else ""
    second = f"$B:1{last}:1" if roles.typed else f"$B{last}"
    around = {eos, *filter(None, [roles.begins])}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}$A{last}",
        pair=f"{first}$A{last} {second}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in sorted(around)],
    )
    return tokenizer.to_str(pretty=True)


def _converted(vocabulary: Vocabulary) -> tuple[Any, list[str]]:
    """Returns a SentencePiece model as a Tokenizer, and its user-defined pieces."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Tokenizer

    proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    tokenizer = Tokenizer(_model(proto, pieces, vocabulary))
    sentinels = {sentinel_piece(number) for number in range(vocabulary.record.sentinels)}
    defined = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    symbols = [piece for piece in defined if piece not in sentinels]
    _set_text_rules(tokenizer, proto, vocabulary, symbols)
    return tokenizer, symbols


def _model(proto: Any, pieces: list[tuple[str, float, int]], vocabulary: Vocabulary) -> Any:
    from tokenizers import models

    byte_fallback = any(kind == BYTE for _, _, kind in pieces)
    added = [vocabulary.piece(token) for token in range(len(pieces), vocabulary.size)]
    kind = proto.trainer_spec.model_type
    if kind == _UNIGRAM:
        # The cost of an unknown character derives from the lowest score of all pieces in
        # `tokenizers`, and of normal pieces in SentencePiece. The lowest score also keeps
        # `tokenizers` from choosing special pieces.
        least = min(score for _, score, kind in pieces if kind == NORMAL)
        scores = [(piece, score if role == NORMAL else least) for piece, score, role in pieces]
        scores += [(piece, least) for piece in added]
        return models.Unigram(scores, unk_id=vocabulary.special.unk, byte_fallback=byte_fallback)
    if kind == _BPE:
        ids = {piece: place for place, (piece, _, _) in enumerate(pieces)}
        ids |= {piece: len(pieces) + place for place, piece in enumerate(added)}
        return models.BPE(
            ids,
            _merges(pieces),
            unk_token=proto.trainer_spec.unk_piece,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    raise UserError(
        "the vocabulary is neither a unigram nor a BPE model: Hugging Face's tokenizers support no "
        "other kind of SentencePiece model"
    )


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Returns every pair of pieces that together form a piece, best scores first."""
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    found = [
        (-score, cut, piece)
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(piece[:cut], piece[cut:]) for _, cut, piece in sorted(found)]


def _removed(processor: Any) -> str:
    """Returns the characters that the normaliser removes, escaped for a regex class."""
    every = [*range(1, 0xD800), *range(0xE000, 0x10000), *range(0xE0000, 0xE1000)]
    plain = processor.normalize("ab")
    found = [code for code in every if processor.normalize(f"a{chr(code)}b") == plain]
    return "".join(rf"\x{{{code:X}}}" for code in found)


def _protected(model: bytes, symbols: list[str]) -> dict[str, str]:
    """Maps the symbols that the rules for text change to text that no normaliser changes.

    The longest symbol is the first.
    """
    from sentencepiece import SentencePieceNormalizer

    # Unlike a processor, it does not know the symbols.
    normalize = SentencePieceNormalizer(model_proto=model).normalize
    changed = [symbol for symbol in symbols if normalize(f"a{symbol}b").strip() != f"a{symbol}b"]
    return {
        symbol: f"{_MARK}{str(number).translate(_DIGITS)}{_MARK}"
        for number, symbol in enumerate(sorted(changed, key=len, reverse=True))
    }


def _set_text_rules(tokenizer: Any, proto: Any, vocabulary: Vocabulary, symbols: list[str]) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    rules = proto.normalizer_spec
    # T5, Llama, Gemma and vocab.train use only these combinations of SentencePiece's settings.
    keeps_spaces = not rules.remove_extra_whitespaces
    if not (rules.add_dummy_prefix or keeps_spaces) or not rules.escape_whitespaces:
        raise UserError(
            "the vocabulary has SentencePiece's remove_extra_whitespaces without add_dummy_prefix, "
            "or no escape_whitespaces: tokenizer.json does not support these"
        )
    # SentencePiece finds user-defined symbols in the text as written, and keeps them.
    protected = _protected(vocabulary.model, symbols)
    steps: list[Any] = [normalizers.Replace(*each) for each in protected.items()]
    if rules.precompiled_charsmap:
        # `Precompiled` looks up a grapheme of under 6 bytes as a whole, applies the shortest rule
        # for its beginning and drops the rest; SentencePiece applies the longest rule at each
        # character. Therefore NFKC runs separately, and marks are split from their letters before
        # the other rules. `Precompiled` also panics on a leading removed or inserted character.
        form = normalizers.NFKC() if "nfkc" in rules.name else normalizers.NFC()
        removed = _removed(vocabulary.processor)
        if removed:
            steps.append(normalizers.Replace(Regex(f"[{removed}]"), _BREAK))
        steps += [
            normalizers.Replace(Regex(f"(?<={_UNSORTED_MARKS})(?={_UNSORTED_MARKS})"), _BREAK),
            normalizers.Replace(_TILDE, _KEPT_TILDE),
            form,
            normalizers.Replace(_KEPT_TILDE, _TILDE),
            normalizers.Replace(Regex(rf"(?<=[\s\S])(?={_EXTENDS})"), _BREAK),
            normalizers.Precompiled(rules.precompiled_charsmap),
            normalizers.Replace(_BREAK, ""),
        ]
    if rules.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(rf"[ {_SPACE}]+\z"), ""),
        ]
    steps += [normalizers.Replace(text, symbol) for symbol, text in protected.items()]
    steps += _first_space(rules.add_dummy_prefix, keeps_spaces, symbols)
    tokenizer.normalizer = normalizers.Sequence(steps)
    if not (rules.add_dummy_prefix and keeps_spaces):
        # "first": text after a special token begins a word only after a space.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            _SPACE, prepend_scheme="first" if rules.add_dummy_prefix else "never", split=False
        )
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(back)


def _first_space(prefix: bool, keeps_spaces: bool, symbols: list[str]) -> list[Any]:
    """Returns the steps that write space symbols, except those that `Metaspace` writes."""
    from tokenizers import Regex, normalizers

    # `tokenizers` normalises each symbol too, which must not get a space symbol.
    every = "|".join("".join(rf"\x{{{ord(char):X}}}" for char in symbol) for symbol in symbols)
    if prefix and keeps_spaces:
        # As in Llama, a space symbol precedes even a leading space.
        first: Any = normalizers.Prepend(_SPACE)
        if symbols:
            first = normalizers.Replace(Regex(rf"\A(?!(?:{every})\z)(?=[\s\S])"), _SPACE)
        return [first, normalizers.Replace(" ", _SPACE)]
    if not prefix:
        return []
    # `Metaspace` mistakes a leading space symbol for its own, and writes none before a symbol.
    steps: list[Any] = [normalizers.Replace(Regex(rf"\A{_SPACE}"), 2 * _SPACE)]
    if symbols:
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{every})\z)(?={every})"), _SPACE))
    return steps


def tokenizer_config(vocabulary: Vocabulary, roles: Roles = Roles()) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json.

    `PreTrainedTokenizerFast` uses tokenizer.json unchanged; T5Tokenizer would replace its white
    space rules. A decoder-only model, whose texts do not end with EOS, pads with EOS, since id 0
    begins every text and must not be masked; it pads on the left, so generation continues the text.
    """
    pieces = vocabulary.special_pieces()
    eos, pad = pieces["eos"], vocabulary.piece(vocabulary.special.pads(not roles.ends))
    named = {"pad_token": pad, "eos_token": eos}
    if "unk" in pieces:
        named["unk_token"] = pieces["unk"]
    if not roles.ends:
        named["bos_token"] = roles.begins
    if roles.mask:
        named |= {"mask_token": roles.mask, "cls_token": roles.begins, "sep_token": eos}
    sentinels = [sentinel_piece(number) for number in range(vocabulary.record.sentinels)]
    types = ["token_type_ids"] if roles.typed else []
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        # transformers 5 renamed this to extra_special_tokens, but still reads it.
        "additional_special_tokens": [piece for piece in sentinels if piece not in named.values()],
        "padding_side": "right" if roles.ends else "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *types, "attention_mask"],
    }


def write(folder: str, vocabulary: Vocabulary, roles: Roles = Roles()) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if there is one, the SentencePiece model.

    A user's class only gets a vocabulary.json: transformers has no format for its encoding.
    """
    if vocabulary.is_registered:
        with open(f"{folder}/{vocabulary.record.file_name}", "wb") as file:
            file.write(vocabulary.model)
        return
    config = json.dumps(tokenizer_config(vocabulary, roles), indent=2)
    text = tokenizer_json(vocabulary, roles)
    written = {TOKENIZER: text.encode(), TOKENIZER_CONFIG: config.encode()}
    if vocabulary.is_sentencepiece:
        written[SPIECE] = vocabulary.model
    for name, data in written.items():
        with open(f"{folder}/{name}", "wb") as file:
            file.write(data)


def compare(tokenizer: Any, vocabulary: Vocabulary, texts: Iterable[str]) -> Match:
    """Compares a transformers tokenizer with the vocabulary's library on texts."""
    for number in range(vocabulary.record.sentinels):
        text, expected = sentinel_piece(number), vocabulary.size - 1 - number
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if found != [expected]:
            raise UserError(f"the tokenizer gives {text} the ids {found}, not {expected}")
    texts = list(texts)
    theirs = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    pairs = [
        (text, ids, expected.tolist())
        for text, ids, expected in zip(texts, theirs, vocabulary.encode(texts), strict=True)
    ]
    different = [pair for pair in pairs if pair[1] != pair[2]]

    def tied(ids: list[int], expected: list[int]) -> bool:
        if not vocabulary.is_sentencepiece:
            return False
        model = vocabulary.processor

        def score(ids: list[int]) -> float:
            return sum(model.get_score(each) for each in ids if each < model.get_piece_size())

        return abs(score(ids) - score(expected)) < _TIE

    ties = [tied(ids, expected) for _, ids, expected in different]
    ordered = [different[place][0] for place in np.argsort(ties, kind="stable")]
    return Match(len(texts), ordered, sum(ties), vocabulary.codec.library)
