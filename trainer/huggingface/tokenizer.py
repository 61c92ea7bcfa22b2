"""A SentencePiece vocabulary as the tokenizer.json of Hugging Face's `tokenizers`, and their match.

What `tokenizers` cannot do as SentencePiece does it:

- Unigram scores are added in float64 and not rounded to float32 after every piece, so that where
  two ways of cutting are as good as equal (most often a run of one character) the other may be
  taken.
- Marks that stand in no canonical order are put into it, and those behind a ligature, as ﬁ, are
  composed with its last letter.
- Texts of special tokens (`</s>`, `<pad>`, `<extra_id_0>`) are found in any text.
- A text that begins with a user-defined symbol, or with a character that normalising takes out,
  has no sign of a space before its first word.
- In BPE the merges into one piece have an order among themselves.

So a match is measured, by `compare`, and not taken for granted.
"""

from __future__ import annotations

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
# TrainerSpec.ModelType of sentencepiece_model.proto; `tokenizers` has no word or char models.
_UNIGRAM, _BPE = 1, 2
_USER_DEFINED = 4
# A noncharacter: no text has it, no rule knows it, and nothing is composed across it.
_BREAK = "\ufdd0"
# SentencePiece's nmt rules keep the wide tilde, alone of what NFKC replaces.
_TILDE, _KEPT_TILDE = "\uff5e", "\ufdd1"
# What does not begin a grapheme: marks, joiners, the colours of hands.
_EXTENDS = r"[\p{M}\x{200C}\x{200D}\x{1F3FB}-\x{1F3FF}]"
# Canonical order sorts the marks behind a letter by their class; SentencePiece leaves them as they
# are. The marks of Arabic and Hebrew are those that people write in another order.
_UNSORTED_MARKS = r"[\u0591-\u05C7\u0610-\u061A\u064B-\u065F\u0670\u06D6-\u06ED]"


class Match(NamedTuple):
    """How many of `texts` give the same ids by both, and those that do not."""

    texts: int
    different: list[str]


def tokenizer_json(vocabulary: Vocabulary, decoder_only: bool = False) -> str:
    """The contents of tokenizer.json.

    Sentinels take the white space before them, as the spans that they stand for do. A text ends in
    EOS; for a `decoder_only` model it begins with id 0 instead, as in training.

    Raises:
      UserError: the model is of a kind that `tokenizers` does not have.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Tokenizer, processors

    proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    tokenizer = Tokenizer(_model(proto, pieces, vocabulary))
    _set_text_rules(tokenizer, proto, vocabulary.processor)
    sentinels = [sentinel_piece(number) for number in range(vocabulary.record.sentinels)]
    names = [piece for piece, _, kind in pieces[:3]]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.add_special_tokens(
        [AddedToken(name, lstrip=True, normalized=False) for name in reversed(sentinels)]
    )
    symbols = [
        piece for piece, _, kind in pieces if kind == _USER_DEFINED and piece not in sentinels
    ]
    tokenizer.add_tokens([AddedToken(symbol, normalized=True) for symbol in symbols])
    first, last = (f"{names[0]} ", "") if decoder_only else ("", f" {names[1]}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}$A{last}",
        pair=f"{first}$A{last} $B{last}",
        special_tokens=[(names[0], 0), (names[1], 1)],
    )
    return tokenizer.to_str(pretty=True)


def _model(proto: Any, pieces: list[tuple[str, float, int]], vocabulary: Vocabulary) -> Any:
    from tokenizers import models

    byte_fallback = any(kind == BYTE for _, _, kind in pieces)
    added = range(vocabulary.record.extra_ids - 1, -1, -1)
    kind = proto.trainer_spec.model_type
    if kind == _UNIGRAM:
        # `tokenizers` takes the least score of all for what SentencePiece takes of normal pieces:
        # what an unknown character costs. It would also find the others in a text.
        least = min(score for _, score, kind in pieces if kind == NORMAL)
        scores = [
            (piece, score if piece_kind == NORMAL else least) for piece, score, piece_kind in pieces
        ]
        scores += [(sentinel_piece(number), least) for number in added]
        return models.Unigram(scores, unk_id=proto.trainer_spec.unk_id, byte_fallback=byte_fallback)
    if kind == _BPE:
        ids = {piece: place for place, (piece, _, _) in enumerate(pieces)}
        ids |= {sentinel_piece(number): len(pieces) + i for i, number in enumerate(added)}
        return models.BPE(
            ids,
            _merges(pieces),
            unk_token=proto.trainer_spec.unk_piece,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    raise UserError(
        "the vocabulary is neither a unigram nor a BPE model: Hugging Face's tokenizers have no "
        "other kinds of SentencePiece's"
    )


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, those of the best scores first."""
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    found = [
        (-score, cut, piece)
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(piece[:cut], piece[cut:]) for _, cut, piece in sorted(found)]


def _removed(processor: Any) -> str:
    """The characters that the normaliser takes out, as a class of a regular expression."""
    every = [*range(1, 0xD800), *range(0xE000, 0x10000), *range(0xE0000, 0xE1000)]
    plain = processor.normalize("ab")
    found = [code for code in every if processor.normalize(f"a{chr(code)}b") == plain]
    return "".join(rf"\x{{{code:X}}}" for code in found)


def _set_text_rules(tokenizer: Any, proto: Any, processor: Any) -> None:
    """Normaliser, spaces and the way back to text."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    rules = proto.normalizer_spec
    # SentencePiece's other combinations are not in use by T5 or by vocab.train.
    if rules.add_dummy_prefix != rules.remove_extra_whitespaces or not rules.escape_whitespaces:
        raise UserError(
            "the vocabulary has SentencePiece's add_dummy_prefix without remove_extra_whitespaces, "
            "or the reverse, or no escape_whitespaces: tokenizer.json is not written for those"
        )
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        # `Precompiled` looks up a grapheme of under 6 bytes as a whole, takes the shortest rule
        # that it begins with and forgets the rest; SentencePiece takes the longest at each
        # character. So what NFKC does is left to NFKC, and every mark is parted from its letter
        # before the other rules are looked up. It also panics where a text begins with what is
        # taken out, or with what was put in.
        form = normalizers.NFKC() if "nfkc" in rules.name else normalizers.NFC()
        removed = _removed(processor)
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
    if rules.add_dummy_prefix:
        # `Metaspace` takes a sign of a space that is in the text for its own.
        steps.append(normalizers.Replace(Regex(rf"\A{_SPACE}"), 2 * _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    # "first": what stands behind a special token begins a word only where there is a space.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        _SPACE, prepend_scheme="first" if rules.add_dummy_prefix else "never", split=False
    )
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(back)


def tokenizer_config(vocabulary: Vocabulary, decoder_only: bool = False) -> dict[str, Any]:
    """The contents of tokenizer_config.json.

    `TokenizersBackend` takes tokenizer.json as it is; transformers' T5Tokenizer would put white
    space rules of its own in its place. For a `decoder_only` model padding is EOS: id 0, with which
    texts begin, must be seen.
    """
    pad, eos, unk = (vocabulary.processor.id_to_piece(number) for number in range(3))
    return {
        "tokenizer_class": "TokenizersBackend",
        "pad_token": eos if decoder_only else pad,
        "eos_token": eos,
        "unk_token": unk,
        **({"bos_token": pad} if decoder_only else {}),
        "extra_special_tokens": [
            sentinel_piece(number) for number in range(vocabulary.record.sentinels)
        ],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def write(folder: str, vocabulary: Vocabulary, decoder_only: bool = False) -> None:
    """Writes tokenizer.json, tokenizer_config.json and spiece.model into a local folder."""
    config = json.dumps(tokenizer_config(vocabulary, decoder_only), indent=2)
    text = tokenizer_json(vocabulary, decoder_only)
    for name, data in (
        (TOKENIZER, text.encode()),
        (TOKENIZER_CONFIG, config.encode()),
        (SPIECE, vocabulary.model),
    ):
        with open(f"{folder}/{name}", "wb") as file:
            file.write(data)


def compare(tokenizer: Any, vocabulary: Vocabulary, texts: Iterable[str]) -> Match:
    """Holds a tokenizer of transformers against SentencePiece, text by text.

    Raises:
      UserError: a sentinel has another id than in training.
    """
    for number in range(vocabulary.record.sentinels):
        text, expected = sentinel_piece(number), vocabulary.size - 1 - number
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if found != [expected]:
            raise UserError(f"the tokenizer gives {text} the ids {found}, not {expected}")
    texts = list(texts)
    theirs = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    different = [
        text
        for text, ids, expected in zip(texts, theirs, vocabulary.encode(texts), strict=True)
        if not np.array_equal(ids, expected)
    ]
    return Match(len(texts), different)
