"""Splits text into the words that SentencePiece's trainers count.

No piece crosses a space, or a border between a letter and an ASCII sign or digit
(`split_by_unicode_script`), so text is split there; sentences in scripts without spaces are split
at their punctuation. The trained model is the same, up to the rounding of sums, but needs only a
third of the distinct words.

Source: SplitIntoWords, TrainerInterface::IsValidSentencePiece, unicode_script.cc of SentencePiece.
"""

import dataclasses
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    from pipeline.tokenizer.word_counts import WordCounter

SPACE = "▁"
KEPT_SYMBOLS = ("\n", "\t")
NORMALIZATIONS = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity")

# A longer word, such as a line of base64 or a paragraph of Thai, is cut. At worst, one piece that
# would cross the cut is missed per 256 characters.
LONGEST_WORD = 256

# Documents are normalised one passage at a time. Counts depend on where it ends, so it stays.
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
# No piece contains these: SentencePiece reserves NUL, tab and ▅, and line ends end its sentences.
_NEVER = "\0\t\n\r▅"


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Splits text into words; plain data that can be sent to any worker.

    `model` is used only for its normaliser; text is first split at `symbols`, the user-defined
    pieces. With `space_runs`, a run of spaces belongs to the word after it.
    """

    model: bytes
    symbols: tuple[str, ...]
    space_runs: bool

    def counter(self) -> "WordCounter":
        from pipeline.tokenizer.fast_tokenizer import Unsupported
        from pipeline.tokenizer.word_counts import WordCounter

        never = (*self.symbols, *_NEVER)
        cuts = self.space_runs, _LETTERS, _SIGNS, LONGEST_WORD, PASSAGE_CHARACTERS
        try:
            return WordCounter(self.model, never, *cuts)
        except Unsupported as error:
            raise UserError(
                f"--extend: words of this vocabulary cannot be counted: {error}"
            ) from None


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
