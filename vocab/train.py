"""Trains a SentencePiece vocabulary on the words of a whole corpus.

    python -m vocab.train --corpus=python_docs --vocab_size=32000 --output=DIR

Writes sentencepiece.model, sentencepiece.vocab, report.json and, last, manifest.json to DIR. The
model has T5's ids, and its last pieces are the sentinels with <extra_id_0> at the very end, so T5X
reads it with `extra_ids = 0`. The same flags and corpus give the same bytes on any machine, with
any number of workers, and after any interruption. Other flags are passed to Beam, as in
pipeline.build.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
import shlex
import tempfile
from typing import Any

from tasks import vocabulary
from tasks.cache.manifest import MANIFEST, as_json
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import Rejected, field, require
from tasks.vocabulary import VOCABULARY
from vocab import count, extend, learn, report, words

_REPORT = "report.json"
_PIECES = "sentencepiece.vocab"
_ID_MAP = "id_map.json"
_FORMAT = 2

_LEAST_MEMORY = 1_000_000_000
_STANDARD_PIECES = ("<pad>", "</s>", "<unk>")


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings that, with the corpus, determine a vocabulary.

    Raises:
      Rejected: a value is out of range, or two values contradict each other.
    """

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
        choices=words.NORMALIZATIONS,
    )
    keep_whitespace: bool = field(
        False,
        "keep runs of spaces, tabs and line ends, as in code; with --byte_fallback, decoding "
        "restores the text exactly, but for U+2581, SentencePiece's own sign for a space",
    )
    split_digits: bool = field(False, "make every digit a piece of its own")
    max_piece_length: int = field(16, "maximum length of a piece in characters, from 1 to 512")
    user_defined_symbols: tuple[str, ...] = field(
        (), "comma-separated pieces that are never split; may be repeated"
    )
    memory_bytes: int = field(
        4_000_000_000,
        "memory limit of every process in bytes, at least 1e9; the corpus may be larger",
    )
    extends: str = field("", "SHA-256 of the model to extend")

    def __post_init__(self) -> None:
        # SentencePiece would reject some of these too, but only after the corpus has been read.
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
            no_space = " " not in symbol and words.SPACE not in symbol
            require(no_space, name, symbol, "without spaces, since no piece can match a space")
            require(symbols.count(symbol) == 1, name, symbol, "given once, not twice")
            new = symbol not in _STANDARD_PIECES and not symbol.startswith("<extra_id_")
            require(new, name, symbol, "other than the pieces that every vocabulary has")

    def as_dict(self) -> dict[str, Any]:
        """Returns the options as plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The user-defined pieces, without the sentinels."""
        kept = words.KEPT_SYMBOLS if self.keep_whitespace and not self.extends else ()
        return (*kept, *self.user_defined_symbols)


@dataclasses.dataclass(frozen=True)
class Work:
    """Settings of the counting of words: by this process, or by Beam if there are `beam_arguments`.

    It does not affect the vocabulary.
    """

    beam_arguments: list[str] | None = None
    verbose: bool = False


def train(
    options: Options,
    corpus: sources.Corpus,
    output: str,
    base: vocabulary.Vocabulary | None = None,
    work: Work = Work(),
) -> vocabulary.Vocabulary:
    """Writes the vocabulary to `output` and returns it; keeps a finished one.

    Args:
      options: the settings of the vocabulary.
      corpus: the corpus to train on.
      output: folder, local or any fsspec URL.
      base: the vocabulary to extend; `options.extends` is its checksum.
      work: how words are counted.

    Raises:
      UserError: `output` holds another vocabulary or cannot be written; the corpus has no text; or
        SentencePiece fails, for instance because `vocab_size` is too large for the corpus. The word
        counts are kept for the next run, even one with other options.
    """
    if kept := _finished(options, corpus, output):
        return kept
    job = _job(options, corpus, output, base)
    _claim(output, job.key)
    count.run(job, work.beam_arguments, work.verbose)
    with progress.shown(f"training {options.vocab_size:,} pieces", None):
        counts = count.add_up(job, *learn.limits(options.memory_bytes))
        model = _model(options, counts, job.splitter, base)
    print(_counted(counts))
    loaded = vocabulary.from_bytes(model)
    _verify(loaded, options)
    measured = report.measure(loaded, corpus)
    # The report is written first: it marks an unfinished folder as this command's (see `_claim`).
    files.write_json(files.join(output, _REPORT), measured.as_dict())
    files.write_bytes(files.join(output, VOCABULARY), model)
    files.write_bytes(files.join(output, _PIECES), _pieces_text(loaded))
    if base:
        ids = extend.id_map(base, loaded.size, options.extra_ids)
        files.write_json(files.join(output, _ID_MAP), ids)
    manifest = {
        "format": _FORMAT,
        "model": as_json(loaded.record),
        "options": options.as_dict(),
        "corpus": corpus.record,
        "counts": counts.statistics,
        "software": {
            "sentencepiece": importlib.metadata.version("sentencepiece"),
            "python": platform.python_version(),
        },
    }
    files.write_json(files.join(output, MANIFEST), manifest)
    count.clean(output)
    print(f"wrote the vocabulary: {output} (sha256 {loaded.record.sha256[:12]})")
    return loaded


def _job(
    options: Options, corpus: sources.Corpus, output: str, base: vocabulary.Vocabulary | None
) -> count.Job:
    sentinels = tuple(map(vocabulary.sentinel_piece, range(options.extra_ids)))
    if base:
        own = extend.own_sentinels(base)
        model = extend.with_symbols(base.model, (*options.symbols, *(() if own else sentinels)))
        symbols = extend.symbols(model)
    else:
        symbols = (*options.symbols, *sentinels)
        model = words.normaliser(options.normalization, options.keep_whitespace, symbols)
    splitter = words.Splitter(model, symbols, options.keep_whitespace)
    parts = [
        _FORMAT,
        hashlib.sha256(model).hexdigest(),
        symbols,
        splitter.space_runs,
        corpus.record,
    ]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return count.Job(output, key, corpus, splitter, options.memory_bytes // 64)


def _model(
    options: Options,
    counts: count.Counts,
    splitter: words.Splitter,
    base: vocabulary.Vocabulary | None,
) -> bytes:
    settings = learn.Settings(
        model_type=options.model_type,
        # SentencePiece never sees the symbols, because text was split at them.
        vocab_size=options.vocab_size - (0 if base else len(options.symbols)),
        character_coverage=options.character_coverage,
        byte_fallback=options.byte_fallback and not base,
        split_digits=options.split_digits,
        allow_whitespace_only_pieces=options.keep_whitespace,
        max_sentencepiece_length=options.max_piece_length,
        hard_vocab_limit=not base,
    )
    learned = learn.learn(settings, counts, 0 if base else len(options.symbols))
    if base:
        grown = extend.extend(base, learned, options.vocab_size, options.symbols)
    else:
        grown = finish(learned, splitter.model, options.symbols)
    return add_sentinels(grown, options.extra_ids)


def _counted(counts: count.Counts) -> str:
    found = counts.statistics
    line = f"counted: {found['words']:,} words, {found['distinct_words']:,} distinct"
    if counts.threshold == 1:
        return f"{line}; training on all of them"
    return (
        f"{line}; training on {found['distinct_words_kept']:,} distinct words that make up "
        f"{found['words_kept'] / found['words']:.2%} of the text; words with fewer than "
        f"{counts.threshold:,.0f} occurrences are sampled to fit --memory_bytes"
    )


def _finished(
    options: Options, corpus: sources.Corpus, output: str
) -> vocabulary.Vocabulary | None:
    """Returns the vocabulary in `output`; None if there is none yet.

    Raises:
      UserError: `output` holds another vocabulary, or one whose model has changed.
    """
    path = files.join(output, MANIFEST)
    if not files.exists(path):
        return None
    manifest = files.read_json(path)
    ours = {**options.as_dict(), **corpus.record}
    try:
        theirs = {**manifest["options"], **manifest["corpus"]}
        sha256 = manifest["model"]["sha256"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the manifest of a vocabulary: choose another --output"
        ) from error
    differing = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    if differing:
        key = differing[0]
        values = f"was {theirs.get(key)}, now {ours.get(key)}"
        raise UserError(
            f"{output} holds a vocabulary made with another {', '.join(differing)}"
            f"{f' ({values})' if len(values) < 100 else ''}: choose another --output"
        )
    model_path = files.join(output, VOCABULARY)
    if not files.exists(model_path) or files.sha256(model_path) != sha256:
        raise UserError(
            f"{model_path} does not match the {MANIFEST} beside it: choose another --output, or "
            "delete the folder and train again"
        )
    print(f"the vocabulary is already finished: {output} (sha256 {sha256[:12]})")
    return vocabulary.load(output)


def _claim(output: str, key: str) -> None:
    """Makes the folder, checks that it can be written, and removes files of other runs.

    Raises:
      UserError: the folder cannot be written, or has a model that this command did not write.
    """
    names = files.list_names(output)
    if VOCABULARY in names and _REPORT not in names:
        raise UserError(
            f"{output} holds a {VOCABULARY} that vocab.train did not write: choose another --output"
        )
    try:
        files.make_folder(output)
        if not files.is_remote(output):
            with tempfile.TemporaryFile(dir=files.local_path(output)):
                pass
    except OSError as error:
        raise UserError(f"--output={output} cannot be written: {error.strerror}") from error
    files.remove_partial(output)
    count.clean(output, key)


def finish(learned: bytes, normaliser: bytes, symbols: tuple[str, ...]) -> bytes:
    """Returns the model with the rules of `normaliser` and with `symbols` inserted after <unk>.

    Raises:
      UserError: a symbol is already a piece.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(learned)
    rules = sentencepiece_model_pb2.ModelProto.FromString(normaliser).normalizer_spec
    proto.normalizer_spec.CopyFrom(rules)
    present = {piece.piece for piece in proto.pieces}
    pieces = list(proto.pieces)
    for place, symbol in enumerate(symbols, vocabulary.UNK_ID + 1):
        if symbol in present:
            raise UserError(f"the symbol {symbol!r} is already a piece")
        kind = proto.SentencePiece.USER_DEFINED
        pieces.insert(place, proto.SentencePiece(piece=symbol, score=0.0, type=kind))
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    proto.trainer_spec.user_defined_symbols.extend(symbols)
    return proto.SerializeToString(deterministic=True)


def add_sentinels(model: bytes, count: int) -> bytes:
    """Returns the model with <extra_id_{count-1}> … <extra_id_0> as its last pieces.

    They are user-defined pieces: they are never split or merged with the text around them.

    Raises:
      UserError: a sentinel is already a piece, because the corpus contains its text.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    present = {piece.piece for piece in proto.pieces}
    for number in reversed(range(count)):
        text = vocabulary.sentinel_piece(number)
        if text in present:
            raise UserError(f"the corpus contains {text} as text, which became a piece")
        proto.pieces.add(piece=text, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True)


def _verify(loaded: vocabulary.Vocabulary, options: Options) -> None:
    """Asserts the properties that every later stage relies on."""
    processor = loaded.processor
    assert loaded.size == options.vocab_size + options.extra_ids
    assert loaded.record.sentinels == options.extra_ids
    assert (processor.unk_id(), processor.bos_id()) == (vocabulary.UNK_ID, -1)
    for number in range(options.extra_ids):
        text = vocabulary.sentinel_piece(number)
        assert processor.encode(f"a {text} b").count(loaded.size - 1 - number) == 1
        assert processor.decode([loaded.size - 1 - number]) == text


def _pieces_text(loaded: vocabulary.Vocabulary) -> bytes:
    """Returns the pieces and their scores in SentencePiece's .vocab format."""
    processor = loaded.processor
    lines = (
        f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in range(loaded.size)
    )
    return "".join(lines).encode()


def _parser() -> command_line.Parser:
    parser = command_line.Parser(prog="python -m vocab.train", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--corpus", required=True, metavar="SPEC", help=f"corpus to train on: {sources.FORMS}")
    add(
        "--output",
        required=True,
        metavar="DIR",
        help="folder for the vocabulary, local or any fsspec URL",
    )
    for option in dataclasses.fields(Options):
        if option.name != "extends":
            _add_option(parser, option)
    add(
        "--user_defined_symbols_file",
        metavar="FILE",
        help="file with more pieces that are never split, one per line",
    )
    add(
        "--extend",
        metavar="DIR",
        help="vocabulary to extend: its ids and scores are kept, and pieces of the corpus are "
        "added up to --vocab_size; id_map.json maps old ids to new ids",
    )
    add(
        "--workers",
        type=command_line.positive,
        default=1,
        help="processes on this machine that count words",
    )
    add("--runner", help="Beam runner, such as DataflowRunner; other flags are passed to Beam")
    add("--verbose", action="store_true", help="show Beam's log")
    return parser


def _add_option(parser: command_line.Parser, option: dataclasses.Field) -> None:
    """Adds the flag of a field of `Options`. A flag that is not given leaves no attribute."""
    words, choices = option.metadata["words"], option.metadata["choices"]
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": words}
    if option.type is bool:
        settings |= {"action": "store_true"}
    elif option.name == "user_defined_symbols":
        settings |= {"action": "append", "metavar": "A,B"}
    else:
        kind = _whole_number if option.type is int else option.type
        settings |= {"type": kind, "help": f"{words} (default: {option.default})"}
        settings |= {"choices": choices} if choices else {}
    parser.add_argument(f"--{option.name}", **settings)


def _whole_number(text: str) -> int:
    """Returns a flag's whole number, which may be written as 4e9."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(value)


def _options(flags: argparse.Namespace) -> tuple[Options, vocabulary.Vocabulary | None]:
    """Returns the options given by the flags, and the vocabulary to extend.

    Raises:
      UserError: a value is out of range, or two flags contradict each other.
    """
    names = [option.name for option in dataclasses.fields(Options)]
    given = {name: getattr(flags, name) for name in names if hasattr(flags, name)}
    given["user_defined_symbols"] = _symbols(flags)
    base = vocabulary.load(flags.extend) if flags.extend else None
    defaults: dict[str, Any] = {}
    if base:
        defaults = extend.settings(base)
        for name, value in given.items():
            if defaults.get(name, value) != value:
                raise UserError(
                    f"--{name}={value} contradicts --extend={flags.extend}, which has "
                    f"{defaults[name]}: leave it out"
                )
        defaults["extends"] = base.record.sha256
    elif given.get("keep_whitespace"):
        defaults["normalization"] = "identity"
    try:
        return Options(**{**defaults, **given}), base
    except Rejected as error:
        raise UserError(f"--{error.field}={error.value} must be {error.rule}") from error


def _symbols(flags: argparse.Namespace) -> tuple[str, ...]:
    """Returns the pieces named by --user_defined_symbols and --user_defined_symbols_file."""
    lists = getattr(flags, "user_defined_symbols", [])
    symbols = [symbol for text in lists for symbol in text.split(",")]
    path = flags.user_defined_symbols_file
    if path:
        try:
            symbols += files.read_bytes(path).decode().splitlines()
        except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
            raise UserError(f"--user_defined_symbols_file={path} cannot be read") from error
    return tuple(symbol for symbol in symbols if symbol)


def main(argv: list[str]) -> None:
    """Runs the command."""
    from pipeline.runners import beam_options

    parser = _parser()
    parser.refuse_others = lambda given: beam_options.reject_unknown(parser, given)
    flags, rest = parser.parse_known_args(argv)
    beam_arguments = None
    if flags.workers > 1 or flags.runner or rest:
        runner = flags.runner or "FnApiRunner"
        beam_arguments = beam_options.arguments(parser, rest, runner, flags.workers)
    spec, output = sources.parse(flags.corpus), flags.output
    options, base = _options(flags)
    work = Work(beam_arguments, flags.verbose)
    corpus = sources.resolve(spec)
    for note in corpus.notes:
        print(note)
    loaded = train(options, corpus, output, base, work)
    measured = report.Report.from_dict(files.read_json(files.join(output, _REPORT)))
    print(f"{loaded.size:,} ids: {options.vocab_size:,} pieces, {options.extra_ids} sentinels")
    if base:
        kept = base.record.pieces - extend.own_sentinels(base)
        print(f"  the first {kept:,} ids are those of {flags.extend}; {_ID_MAP} maps the rest")
    print(measured)
    command = ["python", "-m", "pipeline.build", "--task=span_corruption", "--name=mine"]
    command += [f"--corpus={spec}", f"--vocabulary={output}", "--cache_dir=cache"]
    print(f"next: {shlex.join(command)}")
    print("      (--task=lm, ul2, prefix_lm or masked_lm for another objective)")


if __name__ == "__main__":
    command_line.run(main)
