"""Options of a SentencePiece vocabulary, and the flags of vocab.train that set them."""

import dataclasses
import json
from typing import Any, ClassVar

from tasks import annexes, vocabulary
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, Rejected, check, field, require
from tasks.terminal.flags import Given, refusal
from vocab import word_splitter

_LEAST_MEMORY = 1_000_000_000
_STANDARD_PIECES = ("<pad>", "</s>", "<unk>")


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings that, with the corpus, determine a vocabulary; raises Rejected if invalid."""

    vocab_size: int = field(32000, "number of pieces, not counting the sentinels")
    extra_ids: int = field(100, "number of sentinels, which get the last ids")
    model_type: str = field("unigram", "SentencePiece's algorithm", choices=("unigram", "bpe"))
    character_coverage: float = field(
        0.9995, "share of the corpus's characters that get a piece, from 0.98 to 1"
    )
    byte_fallback: bool = field(
        False, "encode characters that have no piece as bytes instead of <unk>"
    )
    normalization: str = field(
        "nmt_nfkc",
        "SentencePiece's normalization rule; nmt_nfkc is T5's, and --keep_whitespace changes the "
        "default to identity",
        choices=word_splitter.NORMALIZATIONS,
    )
    keep_whitespace: bool = field(
        False,
        "keep runs of spaces, tabs and line ends, as code needs; with --byte_fallback, decoding "
        "restores the text exactly, except U+2581, SentencePiece's sign for a space",
    )
    split_digits: bool = field(False, "make every digit a separate piece")
    max_piece_length: int = field(16, "maximum length of a piece in characters, from 1 to 512")
    user_defined_symbols: tuple[str, ...] = field(
        (),
        "comma-separated pieces that are never split; may be repeated",
        metavar="A,B",
        repeated=True,
    )
    memory_bytes: int = field(
        4_000_000_000,
        "memory limit of every process in bytes, at least 1e9; the corpus may be larger",
    )
    # SHA-256 of the model to extend.
    extends: str = ""

    def __post_init__(self) -> None:
        check(self)
        # SentencePiece would also reject some of these, but only after the corpus has been read.
        require(self.vocab_size > 0, "vocab_size", self.vocab_size, "more than 0")
        require(self.extra_ids >= 0, "extra_ids", self.extra_ids, "0 or more")
        coverage, length = self.character_coverage, self.max_piece_length
        require(0.98 <= coverage <= 1, "character_coverage", coverage, "between 0.98 and 1")
        require(1 <= length <= 512, "max_piece_length", length, "from 1 to 512")
        rule = f"at least {_LEAST_MEMORY:,}, which SentencePiece needs even for a small corpus"
        require(self.memory_bytes >= _LEAST_MEMORY, "memory_bytes", self.memory_bytes, rule)
        if self.keep_whitespace and not self.extends:
            rule = "identity, nfkc or nfkc_cf: with keep_whitespace, tabs and line ends must remain"
            holds = not self.normalization.startswith("nmt_")
            require(holds, "normalization", self.normalization, rule)
        name, symbols = "user_defined_symbols", self.user_defined_symbols
        for symbol in symbols:
            no_space = " " not in symbol and word_splitter.SPACE not in symbol
            require(no_space, name, symbol, "without spaces, since no piece can match a space")
            require(symbols.count(symbol) == 1, name, symbol, "given once, not twice")
            new = symbol not in _STANDARD_PIECES and not symbol.startswith("<extra_id_")
            require(new, name, symbol, "other than the pieces that every vocabulary has")

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def symbols(self) -> tuple[str, ...]:
        kept = word_splitter.KEPT_SYMBOLS if self.keep_whitespace and not self.extends else ()
        return (*kept, *self.user_defined_symbols)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionFlags:
    """Flags for `Options` as typed, and for more symbols."""

    ANNEXES: ClassVar[str] = "flags.vocab_train"

    options: Given = field(REQUIRED, "the vocabulary", flat=True, partial=Options)
    user_defined_symbols_file: str | None = field(
        None, "file with more pieces that are never split, one per line", metavar="FILE"
    )


def extended_by(flags: OptionFlags) -> str | None:
    """Returns the path of a vocabulary to extend, if a flag of an annex names one."""
    return getattr(getattr(flags, "extending", None), "extend", None)


def extension() -> Any:
    """Returns the annex that extends vocabularies; raises a UserError without it."""
    if found := annexes.get("vocabularies", "extension"):
        return found
    raise UserError("this installation cannot extend vocabularies")


def options_of(flags: OptionFlags) -> tuple[Options, vocabulary.Vocabulary | None]:
    """Returns the options given by the flags, and the vocabulary to extend."""
    given = dict(flags.options.values)
    given["user_defined_symbols"] = _symbols(flags)
    path = extended_by(flags)
    base = vocabulary.load(path) if path else None
    defaults: dict[str, Any] = {}
    if base:
        defaults = extension().settings(base)
        for name, value in given.items():
            if defaults.get(name, value) != value:
                raise UserError(
                    f"--{name}={value} contradicts --extend={path}, which has "
                    f"{defaults[name]}: leave it out"
                )
        defaults["extends"] = base.record.sha256
    elif given.get("keep_whitespace"):
        defaults["normalization"] = "identity"
    try:
        return Options(**{**defaults, **given}), base
    except Rejected as error:
        typed = flags.options.typed.get(error.field, f"--{error.field}={error.value}")
        raise refusal(error, typed) from error


def _symbols(flags: OptionFlags) -> tuple[str, ...]:
    lists = flags.options.values.get("user_defined_symbols", ())
    symbols = [symbol for text in lists for symbol in text.split(",")]
    path = flags.user_defined_symbols_file
    if path:
        try:
            symbols += files.read_lines(path)
        except FileNotFoundError as error:
            raise UserError(f"--user_defined_symbols_file={path} cannot be read") from error
    return tuple(symbol for symbol in symbols if symbol)
