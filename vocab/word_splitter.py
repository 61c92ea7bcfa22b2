"""Splits text into the words that SentencePiece's trainers count.

No piece crosses a space, or a border between a letter and an ASCII sign or digit
(`split_by_unicode_script`), so text is split there; sentences in scripts without spaces are split
at their punctuation. The trained model is the same, up to the rounding of sums, but needs only a
third of the distinct words.

Source: SplitIntoWords, TrainerInterface::IsValidSentencePiece, unicode_script.cc of SentencePiece.
"""

import dataclasses
import functools
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

SPACE = "▁"
KEPT_SYMBOLS = ("\n", "\t")
NORMALIZATIONS = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity")

# A longer word, such as a line of base64 or a paragraph of Thai, is cut. At worst, one piece that
# would cross the cut is missed per 256 characters.
LONGEST_WORD = 256

# Documents are normalised one passage at a time: SentencePiece uses 24 bytes of memory per byte.
PASSAGE_CHARACTERS = 4096

# Letters of these scripts are never `Common`; ASCII signs and digits always are.
_LETTERS = (
    "A-Za-zÀ-ÖØ-öø-ʸ"  # Latin
    "Ͱ-ͳͶͷΆΈ-ΊΌΎ-ΡΣ-ϡ"  # Greek
    "Ѐ-ҁҊ-ԯ"  # Cyrillic
    "א-ת"  # Hebrew
    "ؠ-ؿف-ي"  # Arabic
    "ऄ-ह"  # Devanagari
    "ก-ะ"  # Thai
    "ぁ-ゖァ-ヺ㐀-䶿一-鿿"  # Hiragana, Katakana and Han, which SentencePiece treats as one script
    "가-힣"  # Hangul
)
_SIGNS = "!-@[-`{-~"
_CUT = re.compile(f"(?<=[{_LETTERS}])(?=[{_SIGNS}])|(?<=[{_SIGNS}])(?=[{_LETTERS}])")
# No piece contains these: SentencePiece reserves NUL, tab and ▅, and line ends end its sentences.
_NEVER = "\0\t\n\r▅"
_RUNS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Splits text into words; plain data that can be sent to any worker.

    `model` is used only for its normaliser; text is first split at `symbols`, the user-defined
    pieces. With `space_runs`, a run of spaces belongs to the word after it.
    """

    model: bytes
    symbols: tuple[str, ...]
    space_runs: bool

    def count(self, texts: Iterable[str]) -> Counter[str]:
        normalize = _processor(self.model).normalize
        # The longest symbol comes first, as in SentencePiece's matcher.
        marks = sorted([*self.symbols, *_NEVER], key=len, reverse=True)
        split = re.compile("|".join(map(re.escape, marks))).split
        raw: Counter[str] = Counter()
        for text in texts:
            for part in split(normalize(text)):
                if self.space_runs:
                    raw.update(_RUNS.findall(part))
                else:
                    first, *others = part.split(SPACE)
                    raw.update([SPACE + word for word in others])
                    if first:
                        raw[first] += 1
        counts: Counter[str] = Counter()
        for word, count in raw.items():
            for part in _CUT.split(word):
                for start in range(0, len(part), LONGEST_WORD):
                    counts[part[start : start + LONGEST_WORD]] += count
        return counts


@functools.lru_cache(maxsize=1)
def _processor(model: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=model)


def normaliser(name: str, keep_whitespace: bool, symbols: Iterable[str]) -> bytes:
    r"""Returns a SentencePiece model that normalises like a vocabulary with these settings.

    With `keep_whitespace`, no space is added, removed or merged. Nor is one added before the first
    word, because the first word of a line follows "\n", not a space.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    # A model with one letter. SentencePieceNormalizer.serialized_model_proto() does not work from
    # Python: version 0.2.1 decodes it as UTF-8 and fails.
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a"]),
        model_writer=model,
        model_type="char",
        vocab_size=10,
        normalization_rule_name=name,
        add_dummy_prefix=not keep_whitespace,
        remove_extra_whitespaces=not keep_whitespace,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    for symbol in symbols:
        proto.pieces.add(piece=symbol, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    return proto.SerializeToString(deterministic=True)


def passages(text: str) -> Iterator[str]:
    """Yields a document in passages, cut at line ends, failing that at sentence ends or spaces."""
    start = 0
    while start < len(text):
        end = start + PASSAGE_CHARACTERS
        if end < len(text):
            cuts = (text.rfind(mark, start, end) + len(mark) for mark in ("\n", ". ", " "))
            end = next((cut for cut in cuts if cut > start + PASSAGE_CHARACTERS // 2), end)
        yield text[start:end]
        start = end
