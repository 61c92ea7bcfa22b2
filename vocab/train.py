"""Trains a SentencePiece vocabulary on the words of a whole corpus.

    python -m vocab.train --corpus=python_docs --vocab_size=32000 --output=DIR

DIR receives sentencepiece.model and .vocab, report.json and, last, manifest.json. The model has
T5's ids, and its last pieces are the sentinels, <extra_id_0> the very last, so that T5X reads it
with `extra_ids = 0`. Equal flags and corpus give equal bytes on any machine, with any number of
workers, and after any interruption. Further flags are Beam's own, as for pipeline.build.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import shlex
import tempfile
from typing import Any

from tasks import vocabulary
from tasks.cache.manifest import MANIFEST
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import UserError
from tasks.vocabulary import VOCABULARY
from vocab import count, extend, learn, report, words

REPORT = "report.json"
PIECES = "sentencepiece.vocab"
ID_MAP = "id_map.json"
FORMAT = 2

_LEAST_MEMORY = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Options:
    """What, with the corpus, determines a vocabulary.

    `memory_bytes` bounds every process, the driver, each worker and SentencePiece; `extends` is the
    sha256 of the model whose ids are kept.
    """

    vocab_size: int
    extra_ids: int = 100
    model_type: str = "unigram"
    character_coverage: float = 0.9995
    byte_fallback: bool = False
    normalization: str = "nmt_nfkc"
    keep_whitespace: bool = False
    split_digits: bool = False
    max_piece_length: int = 16
    user_defined_symbols: tuple[str, ...] = ()
    memory_bytes: int = 4_000_000_000
    extends: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def symbols(self) -> tuple[str, ...]:
        """Pieces that stand for themselves, besides the sentinels."""
        kept = words.KEPT_SYMBOLS if self.keep_whitespace and not self.extends else ()
        return (*kept, *self.user_defined_symbols)


@dataclasses.dataclass(frozen=True)
class Work:
    """Who counts: without `beam_arguments` this process alone. The vocabulary is the same."""

    beam_arguments: list[str] | None = None
    verbose: bool = False


def train(
    options: Options,
    corpus: sources.Corpus,
    output: str,
    base: vocabulary.Vocabulary | None = None,
    work: Work = Work(),
) -> vocabulary.Vocabulary:
    """Writes the vocabulary to `output` and returns it; keeps one that is finished there.

    Args:
      options: what is wanted.
      corpus: what it is learned from.
      output: folder, local or any fsspec URL.
      base: the vocabulary to extend, of which `options.extends` is the checksum.
      work: who counts the words.

    Raises:
      UserError: `output` holds another vocabulary or cannot be written; the corpus has no text; or
        SentencePiece refuses, such as a vocabulary too large for the corpus. What was counted is
        kept for the next run, also with other options.
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
    # The report comes first: it marks an unfinished folder as ours (see `_claim`).
    files.write_json(files.join(output, REPORT), measured.as_dict())
    files.write_bytes(files.join(output, VOCABULARY), model)
    files.write_bytes(files.join(output, PIECES), _pieces_text(loaded))
    if base:
        ids = extend.id_map(base, loaded.size, options.extra_ids)
        files.write_json(files.join(output, ID_MAP), ids)
    manifest = {
        "format": FORMAT,
        "model": dataclasses.asdict(loaded.record),
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
    print(f"vocabulary is written: {output} (sha256 {loaded.record.sha256[:12]})")
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
    parts = [FORMAT, hashlib.sha256(model).hexdigest(), symbols, splitter.space_runs, corpus.record]
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
        # SentencePiece never sees the symbols: the words were cut at them.
        vocab_size=options.vocab_size - (0 if base else len(options.symbols)),
        character_coverage=options.character_coverage,
        byte_fallback=options.byte_fallback and not base,
        split_digits=options.split_digits,
        allow_whitespace_only_pieces=options.keep_whitespace,
        max_sentencepiece_length=options.max_piece_length,
        hard_vocab_limit=not base,
    )
    learned = learn.learn(settings, counts)
    if base:
        grown = extend.extend(base, learned, options.vocab_size, options.symbols)
    else:
        grown = finish(learned, splitter.model, options.symbols)
    return add_sentinels(grown, options.extra_ids)


def _counted(counts: count.Counts) -> str:
    found = counts.statistics
    line = f"counted: {found['words']:,} words, {found['distinct_words']:,} distinct"
    if counts.threshold == 1:
        return f"{line}, all trained on"
    return (
        f"{line}, trained on {found['distinct_words_kept']:,} that are "
        f"{found['words_kept'] / found['words']:.2%} of them; rarer than {counts.threshold:,.0f} "
        "times, a sample (--memory_bytes)"
    )


def _finished(
    options: Options, corpus: sources.Corpus, output: str
) -> vocabulary.Vocabulary | None:
    path = files.join(output, MANIFEST)
    if not files.exists(path):
        return None
    manifest = files.read_json(path)
    ours = {**options.as_dict(), **corpus.record}
    try:
        theirs = {**manifest["options"], **manifest["corpus"]}
        sha256 = manifest["model"]["sha256"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a vocabulary's: choose another --output") from error
    differing = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    if differing:
        key = differing[0]
        values = f"{theirs.get(key)} there, {ours.get(key)} now"
        raise UserError(
            f"{output} holds a vocabulary made with another {', '.join(differing)}"
            f"{f' ({values})' if len(values) < 100 else ''}: choose another --output"
        )
    model_path = files.join(output, VOCABULARY)
    if not files.exists(model_path) or files.sha256(model_path) != sha256:
        raise UserError(
            f"{model_path} is not the file that {MANIFEST} beside it describes: choose another "
            "--output, or delete the folder and train again"
        )
    print(f"vocabulary is finished: {output} (sha256 {sha256[:12]})")
    return vocabulary.load(output)


def _claim(output: str, key: str) -> None:
    """Makes the folder, and finds out before the work whether it can be written."""
    there = files.list_names(output)
    if VOCABULARY in there and REPORT not in there:
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
    """Returns the model with the normaliser's rules, and `symbols` after <unk>, where they belong.

    Raises:
      UserError: a symbol is a piece already.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(learned)
    rules = sentencepiece_model_pb2.ModelProto.FromString(normaliser).normalizer_spec
    proto.normalizer_spec.CopyFrom(rules)
    present = {piece.piece for piece in proto.pieces}
    pieces = list(proto.pieces)
    for place, symbol in enumerate(symbols, vocabulary.UNK_ID + 1):
        if symbol in present:
            raise UserError(f"the symbol {symbol!r} is a piece already")
        kind = proto.SentencePiece.USER_DEFINED
        pieces.insert(place, proto.SentencePiece(piece=symbol, score=0.0, type=kind))
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    proto.trainer_spec.user_defined_symbols.extend(symbols)
    return proto.SerializeToString(deterministic=True)


def add_sentinels(model: bytes, count: int) -> bytes:
    """Returns the model with <extra_id_{count-1}> … <extra_id_0> as its last pieces.

    They are user-defined pieces: found in text as a whole, whatever is beside them, and written
    back as they are.

    Raises:
      UserError: the text of a sentinel is a piece already; the corpus contains it.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    present = {piece.piece for piece in proto.pieces}
    for number in reversed(range(count)):
        text = vocabulary.sentinel_piece(number)
        if text in present:
            raise UserError(f"the corpus contains {text} as text, so that it became a piece")
        proto.pieces.add(piece=text, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True)


def _verify(loaded: vocabulary.Vocabulary, options: Options) -> None:
    """Asserts what everything downstream takes for granted."""
    processor = loaded.processor
    assert loaded.size == options.vocab_size + options.extra_ids
    assert loaded.record.sentinels == options.extra_ids
    assert (processor.unk_id(), processor.bos_id()) == (vocabulary.UNK_ID, -1)
    for number in range(options.extra_ids):
        text = vocabulary.sentinel_piece(number)
        assert processor.encode(f"a {text} b").count(loaded.size - 1 - number) == 1
        assert processor.decode([loaded.size - 1 - number]) == text


def _pieces_text(loaded: vocabulary.Vocabulary) -> bytes:
    """The pieces and their scores as SentencePiece lists them, for people."""
    processor = loaded.processor
    lines = (
        f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in range(loaded.size)
    )
    return "".join(lines).encode()


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        prog="python -m vocab.train",
        description="Trains a SentencePiece vocabulary on a corpus.",
        formatter_class=argparse.HelpFormatter,
    )
    add = parser.add_argument
    add("--corpus", required=True, help=sources.FORMS)
    add("--output", required=True, help="folder for the vocabulary, local or any fsspec URL")
    add("--vocab_size", type=int, default=32000, help="pieces, without the sentinels (32000)")
    add("--extra_ids", type=int, help="sentinels, as the last pieces (100)")
    add("--model_type", choices=("unigram", "bpe"), help="algorithm (unigram)")
    add("--character_coverage", type=float, default=Options.character_coverage,
        help="share of the corpus's characters that get a piece (0.9995)")  # fmt: skip
    add("--byte_fallback", action="store_true", default=None,
        help="write characters without a piece as bytes instead of <unk>")  # fmt: skip
    add("--normalization", choices=words.NORMALIZATIONS,
        help="SentencePiece's rule (nmt_nfkc, as T5; identity with --keep_whitespace)")  # fmt: skip
    add("--keep_whitespace", action="store_true", default=None,
        help="keep runs of spaces, tabs and line ends, as code needs them; with --byte_fallback "
        "text comes back as it was")  # fmt: skip
    add("--split_digits", action="store_true", help="every digit is a piece of its own")
    add("--max_piece_length", type=int, default=Options.max_piece_length,
        help="characters of the longest piece (16)")  # fmt: skip
    add("--user_defined_symbols", action="append", default=[], metavar="A,B",
        help="pieces that are never split; may be given several times")  # fmt: skip
    add("--user_defined_symbols_file", metavar="FILE", help="more of them, one a line")
    add("--extend", metavar="DIR", help="a vocabulary whose ids and scores are kept, to which "
        "pieces of the corpus are added up to --vocab_size; see id_map.json")  # fmt: skip
    add("--memory_bytes", type=float, default=Options.memory_bytes,
        help="the most memory that any process takes (4e9); corpora may be larger")  # fmt: skip
    add("--workers", type=int, default=1, help="processes on this machine that count (1)")
    add("--runner", help="Beam's runner, such as DataflowRunner; further flags are Beam's")
    add("--verbose", action="store_true", help="show Beam's log")
    return parser


def _options(flags: argparse.Namespace) -> tuple[Options, vocabulary.Vocabulary | None]:
    """Returns the options that the flags mean, and the vocabulary to extend.

    Raises:
      UserError: a value is out of range, or two flags contradict each other.
    """
    base = vocabulary.load(flags.extend) if flags.extend else None
    inherited = extend.settings(base) if base else {}
    chosen = {
        name: getattr(flags, name)
        for name in ("extra_ids", "model_type", "byte_fallback", "normalization", "keep_whitespace")
        if getattr(flags, name) is not None
    }
    for name, value in chosen.items():
        if inherited.get(name, value) != value:
            raise UserError(
                f"--{name}={value} contradicts --extend={flags.extend}, which has "
                f"{inherited[name]}: leave it out"
            )
    symbols = [symbol for text in flags.user_defined_symbols for symbol in text.split(",")]
    if flags.user_defined_symbols_file:
        try:
            text = files.read_bytes(flags.user_defined_symbols_file).decode()
        except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
            path = flags.user_defined_symbols_file
            raise UserError(f"--user_defined_symbols_file={path} cannot be read") from error
        symbols += text.splitlines()
    if not base and flags.keep_whitespace:
        inherited["normalization"] = "identity"
    options = Options(
        vocab_size=flags.vocab_size,
        character_coverage=flags.character_coverage,
        split_digits=flags.split_digits,
        max_piece_length=flags.max_piece_length,
        user_defined_symbols=tuple(symbol for symbol in symbols if symbol),
        memory_bytes=int(flags.memory_bytes),
        extends=base.record.sha256 if base else "",
        **{**inherited, **chosen},
    )
    _check(options)
    return options, base


def _check(options: Options) -> None:
    # SentencePiece would refuse some of these too, but only after the corpus is read.
    if options.vocab_size <= 0:
        raise UserError(f"--vocab_size={options.vocab_size} must be more than 0")
    if options.extra_ids < 0:
        raise UserError(f"--extra_ids={options.extra_ids} must not be negative")
    if not 0.98 <= options.character_coverage <= 1:
        raise UserError(
            f"--character_coverage={options.character_coverage} must be between 0.98 and 1"
        )
    if not 1 <= options.max_piece_length <= 512:
        raise UserError(f"--max_piece_length={options.max_piece_length} must be from 1 to 512")
    if options.memory_bytes < _LEAST_MEMORY:
        raise UserError(
            f"--memory_bytes={options.memory_bytes} must be at least {_LEAST_MEMORY:,}, which "
            "SentencePiece takes for little text"
        )
    if options.keep_whitespace and options.normalization.startswith("nmt_") and not options.extends:
        raise UserError(
            f"--keep_whitespace: --normalization={options.normalization} makes spaces of tabs and "
            "line ends; use identity or nfkc"
        )
    symbols = options.user_defined_symbols
    for symbol in symbols:
        if " " in symbol or words.SPACE in symbol:
            raise UserError(f"the symbol {symbol!r} has a space in it, which no piece can match")
        if symbols.count(symbol) > 1:
            raise UserError(f"the symbol {symbol!r} is given twice")
        if symbol in ("<pad>", "</s>", "<unk>") or symbol.startswith("<extra_id_"):
            raise UserError(f"the symbol {symbol!r} is one that every vocabulary has")


def main(argv: list[str]) -> None:
    """The command."""
    parser = _parser()
    flags, rest = parser.parse_known_args(argv)
    beam_arguments = None
    if flags.workers < 1:
        raise UserError(f"--workers={flags.workers} must be more than 0")
    if flags.workers > 1 or flags.runner or rest:
        from pipeline.runners import beam_options

        runner = flags.runner or "FnApiRunner"
        beam_arguments = beam_options.arguments(parser, rest, runner, flags.workers)
    spec, output = sources.parse(flags.corpus), flags.output
    options, base = _options(flags)
    work = Work(beam_arguments, flags.verbose)
    loaded = train(options, sources.resolve(spec), output, base, work)
    measured = report.Report.from_dict(files.read_json(files.join(output, REPORT)))
    task = "python_docs" if spec.kind == "python_docs" else "rlm"
    print(f"{loaded.size:,} ids: {options.vocab_size:,} pieces, {options.extra_ids} sentinels")
    if base:
        kept = base.record.pieces - extend.own_sentinels(base)
        print(f"  the first {kept:,} are those of {flags.extend}; {ID_MAP} maps all")
    print(measured)
    print(
        f"next: python -m pipeline.build --task={task}_span_corruption "
        f"--corpus={shlex.quote(str(spec))} --vocabulary={shlex.quote(output)} --cache_dir=DIR"
    )


if __name__ == "__main__":
    command_line.run(main)
