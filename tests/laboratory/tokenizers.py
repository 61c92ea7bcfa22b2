"""Random tokenizers of each kind, whose ids of random texts must be those of their libraries.

Texts are made of words, odd and hostile strings and characters of every block of Unicode, of
repetitions up to a megabyte, and of what spells special tokens and sentinels. Lone surrogates are
no characters of UTF-8, so Arrow's texts cannot hold them.
"""

import argparse
import functools
import io
import json
import pathlib
import random
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from pipeline.tokenizer import byte_level, tokenize
from tasks import vocabulary
from tasks.reading import stdlib_docs
from tests.laboratory.commands import Difference

_BATCH = 1000
_KINDS = ("byte-level BPE", "BPE", "unigram", "WordPiece", "tokenizer.json unigram")
_TOKENS = ("<|endoftext|>", "<unk>", "<s>", "</s>", "[CLS]", "<extra>", "<0x41>", "▁the", "  ")
_ODD = (
    *_TOKENS, "<extra_id_0>", "<|endoftext|", "<extra_id_", "'s", "'LL", "'ſ", "don't", "\0",
    "\x01", "\0\0", "\x7f", " ", "   ", "\t", "\n", "\r\n", "\n\n  ", "\u00a0", "\u2028",
    "\u3000", "\x85", "\u200b", "\ufeff", "e\u0301", "a" + "\u0301\u0323" * 3, "x" * 16,
    "ab" * 20, "-" * 70, "12345", "Ⅷ²", "１２", "ﬁ", "ﷺ", "中文字", "日本語の", "ก็นี้", "한각",
    "\u1100\u1161\u11a8", "🇷🇴", "\ufffd", "👩\u200d👩\u200d👧", "“quoted”", "…", "naïve", "Straße",
    "İ", "ș", "Ţ", "\U0010ffff", "#include", "\u202bעברית\u202c",
)  # fmt: skip
# Graphemes of several characters.
_GRAPHEMES = (
    "ế\u0323", "각\u0301", "👁️\u200d🗨️", "👍🏽", "A🏻", "©\u200d©", "क्षि\u0301", "\u0600a",
    "ａ\u0301",
    "Ａ\u0301\u0302", "\u0345\u0345", "´", "ﬁ\u0301", "\U000e0001\u0345\u0345", "🇷🇴\u0301",
    "＜unk＞", "\u0128\u0303", "ア\u3099", "и\u0306", "ا\u0653\u0654", "\t\u0301", "\r\u0301",
)  # fmt: skip
# Too long for every batch: one for each tokenizer.
_LONG = (
    lambda draw: draw.choice("a é中\n\0▁") * (1_000_000 // draw.choice((1, 8))),
    lambda draw: "o" + "".join(draw.choices("\u0300\u0323\u0345\u302a\u0f39", k=200)) + "o",
    lambda draw: " ".join(draw.choices(_ODD, k=20_000)),
)


class Trial:
    """A tokenizer and its texts."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        self.draw, self._count = random.Random(f"{flags.seed} tokenizers {number}"), flags.texts
        self.kind = _KINDS[number % len(_KINDS)]

    def run(self) -> str:
        """Returns what the tokenizer is; raises a Difference."""
        model, made = self._model()
        loaded = vocabulary.from_bytes(model)
        fast = tokenize.fast(loaded)
        texts = (self._text() for _ in range(self._count))
        most = 50_000 if self.kind == "BPE" else None  # SentencePiece's may take quadratic time
        hostile = [make(self.draw)[:most] for make in _LONG]
        for batch in (*([text] for text in hostile), [*stdlib_docs.documents().values()][::40]):
            self._compare(loaded, fast, batch, made)
        while batch := [text for text, _ in zip(texts, range(_BATCH), strict=False)]:
            self._compare(loaded, fast, batch, made)
        return f"{made}, {self._count:,} texts, {fast.refused:,} left to the library"

    def clean(self) -> None:
        """Nothing is kept."""

    def _compare(self, loaded: Any, fast: tokenize.Fast, texts: list[str], made: str) -> None:
        tokens, lengths = fast.encode(pa.array(texts))
        ends = np.cumsum(lengths)
        for text, end, length, ids in zip(texts, ends, lengths, loaded.encode(texts), strict=True):
            found = tokens[end - length : end]
            if not np.array_equal(found, ids):
                raise Difference(f"{made}: {text[:200]!r} has {found[:20]}, not {ids[:20]}")

    def _text(self) -> str:
        """Returns up to a dozen parts; in one text in eight, each after many plain words."""
        draw, parts = self.draw, []
        plain = draw.random() < 0.125
        for _ in range(draw.randrange(12)):
            part = draw.random()
            if plain:
                words = (draw.choice(_words()) for _ in range(draw.randrange(30)))
                parts += (word + draw.choice((" ", " ", "  ", "\n", "\n    ")) for word in words)
            if part < 0.1:
                parts.append(draw.choice(_GRAPHEMES))
            elif part < 0.4:
                parts.append(draw.choice(_ODD))
            elif part < 0.6:
                parts.append(draw.choice(_words()))
            elif part < 0.8:
                parts.append(draw.choice((" ", " ", "'", "", "\n")) + draw.choice(_words()).lower())
            elif part < 0.9:
                parts.append(draw.choice(_characters()) * draw.choice((1, 1, 2, 9)))
            else:
                parts.append("".join(draw.choices("abcde fgh\n'1", k=draw.randrange(1, 40))))
        return "".join(parts)

    def _sample(self) -> list[str]:
        lines = self.draw.choices(_lines(), k=self.draw.choice((300, 1500)))
        return lines + [text for text in (self._text() for _ in range(500)) if "\0" not in text]

    def _model(self) -> tuple[bytes, str]:
        if self.kind in ("BPE", "unigram"):
            return self._sentencepiece()
        return self._tokenizer_json() if self.kind in _KINDS[:4] else self._unigram_json()

    def _sentencepiece(self) -> tuple[bytes, str]:
        draw, options = self.draw, {}
        choices: dict[str, tuple[Any, ...]] = {
            "byte_fallback": (True, False),
            "character_coverage": (1.0, 0.999, 0.98),
            "normalization_rule_name": ("nmt_nfkc", "identity", "nfkc", "nmt_nfkc_cf"),
            "add_dummy_prefix": (True, True, False),
            "remove_extra_whitespaces": (True, True, False),
            "split_by_whitespace": (True, True, False),
            "allow_whitespace_only_pieces": (True, False),
            "split_digits": (True, False),
            "treat_whitespace_as_suffix": (False, False, True),
            "user_defined_symbols": ([], ["<extra>"], ["==", "ab", "e\u0301", "中文"]),
            "vocab_size": (1000, 2000, 4000),
        }
        options = {name: draw.choice(values) for name, values in choices.items()}
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(self._sample()), model_writer=model, hard_vocab_limit=False,
            model_type=self.kind.lower(), pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
            num_threads=1, **options,
        )  # fmt: skip
        return model.getvalue(), f"{self.kind} {options}"

    def _tokenizer_json(self) -> tuple[bytes, str]:
        draw, is_bytes = self.draw, self.kind == "byte-level BPE"
        whole, prefix = draw.random() < 0.3, draw.random() < 0.3
        pattern = draw.choice([byte_level.GPT2, *byte_level.PATTERNS])
        normaliser = draw.choice((None, None, normalizers.NFC(), normalizers.NFKC()))
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        size = draw.choice((400, 1500, 5000))
        if is_bytes:
            made = Tokenizer(models.BPE(ignore_merges=whole))
            how = draw.choice((("isolated", False), ("removed", True)))
            split = pre_tokenizers.Split(Regex(pattern), *how)
            level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
            if prefix:
                made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
            made.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=size, initial_alphabet=alphabet, show_progress=False
            )
        else:
            most = draw.choice((7, 30, 100))
            made = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=most))
            names = ("clean_text", "lowercase", "handle_chinese_chars")
            drawn = {name: draw.random() < 0.5 for name in names}
            drawn["strip_accents"] = draw.choice((None, True, False))
            bert = normalizers.BertNormalizer(**drawn)
            kinds = (normalizers.NFKD, normalizers.Lowercase, normalizers.StripAccents)
            steps = [bert, *(kind() for kind in draw.sample(kinds, 2))]
            normaliser = draw.choice([bert, normalizers.Sequence(draw.sample(steps, 2))])
            made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            made.decoder = decoders.WordPiece()
            trainer = trainers.WordPieceTrainer(
                vocab_size=size, special_tokens=["[UNK]"], show_progress=False
            )
        if normaliser:
            made.normalizer = normaliser
        made.train_from_iterator(self._sample(), trainer)
        normalised = is_bytes and draw.random() < 0.5
        tokens = draw.sample(_TOKENS, draw.randrange(5))
        made.add_tokens([AddedToken(each, normalized=normalised) for each in tokens])
        value = json.loads(made.to_str())
        first = draw.choice((0, 0, 1 << 16, 1 << 20)) if is_bytes and not tokens else 0
        vocab = {piece: first + number for piece, number in value["model"]["vocab"].items()}
        if whole and is_bytes and not tokens:
            vocab |= {f"Ġ{word}": first + len(vocab) + n for n, word in enumerate(("zzz", "qqqq"))}
        value["model"]["vocab"] = vocab
        split_by = pattern if is_bytes and not prefix else ""
        rules = (split_by, prefix, whole, normaliser, tokens, first)
        return json.dumps(value).encode(), f"{self.kind} {rules}"

    def _unigram_json(self) -> tuple[bytes, str]:
        """Returns pieces of the library's trainer with drawn scores and parts."""
        draw, falls_back = self.draw, self.draw.random() < 0.3
        splits, rules = draw.random() < 0.35, draw.choice(("", *["nmt_nfkc"] * 3, *_CHARSMAPS))
        content, strip = draw.choice(" ▁"), normalizers.Strip(draw.random() < 0.5, True)
        collapse = normalizers.Replace(Regex(" {2,}"), " " if splits else content)
        steps = draw.choice(([], [collapse], [strip, collapse]))
        if rules:
            steps = [normalizers.Precompiled(charsmap(rules)), *steps]
        scheme = "always" if splits else draw.choice(("always", "always", "never"))
        metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        both = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence(steps)
        made.pre_tokenizer = both if splits else metaspace
        special = ["<pad>", "<unk>"]
        special += [f"<0x{byte:02X}>" for byte in range(256)] if falls_back else []
        trainer = trainers.UnigramTrainer(
            vocab_size=draw.choice((3000, 5000)), special_tokens=special, unk_token="<unk>",
            n_sub_iterations=1, show_progress=False,
        )  # fmt: skip
        sample = [text for text in self._sample() if not {"<", "＜"} & {*text}]
        made.train_from_iterator(sample, trainer)
        value = json.loads(made.to_str())
        model, scores = value["model"], draw.choice(("its own", "rounded", "by length"))
        model["byte_fallback"] = falls_back
        if scores != "its own":  # many ties
            model["vocab"] = [
                [piece, 0.0 if score == 0 else round(score) if scores == "rounded" else -len(piece)]
                for piece, score in model["vocab"]
            ]
        value["added_tokens"] = value["added_tokens"][: draw.choice((0, 2))]
        made = Tokenizer.from_str(json.dumps(value))
        tokens = draw.sample([each for each in _TOKENS if " " not in each], draw.randrange(3))
        late = draw.random() < 0.3 and "▁the" not in tokens
        made.add_tokens([AddedToken(each, normalized=late) for each in tokens])
        parts = (rules, steps[bool(rules) :], splits, scheme, falls_back, scores, tokens, late)
        return made.to_str().encode(), f"{self.kind} {parts}"


_CHARSMAPS = ("nfkc", "nmt_nfkc_cf", "nfkc_cf")


@functools.cache
def charsmap(rules: str) -> bytes:
    """Returns the precompiled charsmap of SentencePiece's normalisation `rules`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c"]), model_writer=model, vocab_size=9, minloglevel=2,
        hard_vocab_limit=False, normalization_rule_name=rules,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    return proto.normalizer_spec.precompiled_charsmap


def _cached(make: Callable[[], Iterator[str]]) -> Callable[[], list[str]]:
    found: list[str] = []

    def once() -> list[str]:
        if not found:
            found.extend(make())
        return found

    return once


@_cached
def _lines() -> Iterator[str]:
    for text in list(stdlib_docs.documents().values())[::10]:
        yield from (line for line in text.splitlines() if line.strip())


@_cached
def _words() -> Iterator[str]:
    yield from sorted({word for line in _lines() for word in line.split()})[:20_000]


@_cached
def _characters() -> Iterator[str]:
    """Yields assigned characters, several of each block, and some that are not assigned."""
    for point in [*range(1, 0x3100), *range(0x3100, 0xD800, 41), *range(0xE000, 0x110000, 61)]:
        if point % 16 == 0 or unicodedata.category(chr(point)) != "Cn":
            yield chr(point)
