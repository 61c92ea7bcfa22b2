"""Trains a SentencePiece vocabulary on a whole corpus.

    python -m vocab.train --corpus=python_docs --vocab_size=32000 --output=DIR

Writes sentencepiece.model, sentencepiece.vocab, report.json and, last, manifest.json to DIR. The
model has T5's ids, and its last pieces are the sentinels with <extra_id_0> at the very end, so T5X
reads it with `extra_ids = 0`. The same flags and corpus give the same bytes on any machine, with
any number of workers, and after any interruption. Other flags are passed to Beam, as in
pipeline.build.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from platform import python_version

from pipeline.runners import engines
from tasks import vocabulary
from tasks.cache.manifest import MANIFEST, as_json
from tasks.reading import sources
from tasks.storage import files, lock
from tasks.terminal import progress
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.vocabulary import VOCABULARY
from vocab import count, fit, folder, learn, protos, weighting, word_splitter
from vocab.options import OptionFlags, Options, extended_by, extension, options_of
from vocab.weighting import Corpora, CorporaFlags, as_corpora
from vocab.word_splitter import Splitter

_REPORT = "report.json"
_PIECES = "sentencepiece.vocab"
_ID_MAP = "id_map.json"
_FORMAT = 2


def train(
    options: Options,
    corpus: sources.Corpus | Corpora,
    output: str,
    base: vocabulary.Vocabulary | None = None,
    runner: engines.Engine | None = None,
) -> vocabulary.Vocabulary:
    """Writes the vocabulary to the folder `output` and returns it; keeps a finished one.

    `base` is the vocabulary to extend; `options.extends` is its checksum. After an error,
    word counts are kept for the next run, even if its options differ.
    """
    corpora = as_corpora(corpus)
    if before := folder.finished(output, options.as_dict(), corpora.record):
        sha256 = before["model"]["sha256"]
        print(f"the vocabulary is already finished: {output} (sha256 {sha256[:12]})")
        return vocabulary.load(output)
    splitter = _splitter(options, base)
    jobs = {name: _job(options, splitter, each, output) for name, each in corpora.parts.items()}
    with _claimed(output, *(job.key for job in jobs.values())) as held:
        for job in jobs.values():
            count.run(job, runner)
        sizes = count.sizes(jobs)
        factors = corpora.factors(sizes)
        with progress.shown(f"training {options.vocab_size:,} pieces", None):
            limits = learn.limits(options.memory_bytes)
            counts = count.add_up(list(jobs.values()), *limits, list(factors.values()))
            model = _model(options, counts, splitter, base)
        print(_counted(counts))
        if len(jobs) > 1:
            print(weighting.shares(sizes, factors))
        loaded = vocabulary.from_bytes(model)
        _verify(loaded, options)
        _write(output, loaded, options, corpora, base)
        manifest = {
            "format": _FORMAT,
            "model": as_json(loaded.record),
            "options": options.as_dict(),
            "corpus": corpora.record,
            "counts": counts.statistics,
            **({"factors": factors} if len(jobs) > 1 else {}),
            "software": {"sentencepiece": version("sentencepiece"), "python": python_version()},
        }
        held.check()
        files.write_json(files.join(output, MANIFEST), manifest)
        count.clean(output)
    print(f"wrote the vocabulary: {output} (sha256 {loaded.record.sha256[:12]})")
    return loaded


def _write(
    output: str,
    loaded: vocabulary.Vocabulary,
    options: Options,
    corpora: Corpora,
    base: vocabulary.Vocabulary | None,
) -> None:
    measured = {name: fit.measure(loaded, each) for name, each in corpora.parts.items()}
    # Because it is written first, it marks an unfinished folder as ours (see `_claimed`).
    files.write_json(files.join(output, _REPORT), fit.as_json(measured))
    files.write_bytes(files.join(output, VOCABULARY), loaded.model)
    of = loaded.processor
    lines = (f"{of.id_to_piece(i)}\t{of.get_score(i):g}\n" for i in range(loaded.size))
    files.write_bytes(files.join(output, _PIECES), "".join(lines).encode())
    if base:
        ids = extension().id_map(base, loaded.size, options.extra_ids)
        files.write_json(files.join(output, _ID_MAP), ids)


def _splitter(options: Options, base: vocabulary.Vocabulary | None) -> Splitter:
    sentinels = tuple(map(vocabulary.sentinel_piece, range(options.extra_ids)))
    if base:
        extend = extension()
        own = extend.own_sentinels(base)
        model = extend.with_symbols(base.model, (*options.symbols, *(() if own else sentinels)))
        symbols = extend.symbols(model)
    else:
        symbols = (*options.symbols, *sentinels)
        model = word_splitter.normaliser(options.normalization, options.keep_whitespace, symbols)
    return Splitter(model, symbols, options.keep_whitespace)


def _job(options: Options, splitter: Splitter, corpus: sources.Corpus, output: str) -> count.Job:
    rules = (hashlib.sha256(splitter.model).hexdigest(), splitter.symbols, splitter.space_runs)
    parts = [_FORMAT, *rules, corpus.record]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return count.Job(output, key, corpus, splitter, options.memory_bytes // 64)


def _model(
    options: Options, counts: count.Counts, splitter: Splitter, base: vocabulary.Vocabulary | None
) -> bytes:
    # SentencePiece never sees the symbols, because the text was split at them.
    symbols = 0 if base else len(options.symbols)
    same = ("model_type", "character_coverage", "split_digits")
    settings = {
        **{name: getattr(options, name) for name in same},
        "vocab_size": options.vocab_size - symbols,
        "byte_fallback": options.byte_fallback and not base,
        "allow_whitespace_only_pieces": options.keep_whitespace,
        "max_sentencepiece_length": options.max_piece_length,
        "hard_vocab_limit": not base,
    }
    learned = learn.learn(settings, counts, symbols)
    if base:
        grown = extension().extend(base, learned, options.vocab_size, options.symbols)
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


@contextlib.contextmanager
def _claimed(output: str, *keys: str) -> Iterator[lock.Lock]:
    """Locks the folder and removes killed runs' files, except the counts of the jobs `keys`."""
    with folder.held(output) as held:
        names = files.list_names(output)
        if VOCABULARY in names and _REPORT not in names:
            raise UserError(
                f"{output} holds a {VOCABULARY} that vocab.train did not write: choose another "
                "--output"
            )
        files.remove_partial(output)
        count.clean(output, *keys)
        yield held


def finish(learned: bytes, normaliser: bytes, symbols: tuple[str, ...]) -> bytes:
    """Returns the model with the rules of `normaliser` and with `symbols` inserted after <unk>."""
    proto = protos.proto_of(learned)
    proto.normalizer_spec.CopyFrom(protos.proto_of(normaliser).normalizer_spec)
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

    As user-defined pieces, they are never split, or merged with surrounding text.
    """
    proto = protos.proto_of(model)
    sentinels = map(vocabulary.sentinel_piece, reversed(range(count)))
    protos.add(proto, sentinels, "the corpus contains {} as text, and it became a piece")
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True)


def _verify(loaded: vocabulary.Vocabulary, options: Options) -> None:
    processor = loaded.processor
    assert loaded.size == options.vocab_size + options.extra_ids
    assert loaded.record.sentinels == options.extra_ids
    assert (processor.unk_id(), processor.bos_id()) == (vocabulary.UNK_ID, -1)
    for number in range(options.extra_ids):
        text = vocabulary.sentinel_piece(number)
        assert processor.encode(f"a {text} b").count(loaded.size - 1 - number) == 1
        assert processor.decode([loaded.size - 1 - number]) == text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(CorporaFlags, OptionFlags):
    """Flags of the command and of its runner."""

    output: str = field(
        REQUIRED, "folder for the vocabulary, local or any fsspec URL", metavar="DIR"
    )
    workers: int = field(1, "processes on this machine that count words", rule=at_least(1))
    runner: str | None = field(None, "cluster whose workers count; see docs/engines.md")
    verbose: bool = field(False, "show the runner's log")
    runner_flags: tuple[str, ...] = field((), "the runner's", rest=engines.refuse_unknown)


def run(flags: Flags) -> None:
    """Trains, and prints a report and the next command."""
    runner = None
    if flags.workers > 1 or flags.runner or flags.runner_flags:
        runner = engines.chosen(flags)
    corpora, output = weighting.corpora_of(flags), flags.output
    options, base = options_of(flags)
    loaded = train(options, corpora, output, base, runner)
    measured = fit.read(files.join(output, _REPORT))
    print(f"{loaded.size:,} ids: {options.vocab_size:,} pieces, {options.extra_ids} sentinels")
    if base:
        kept = base.record.pieces - extension().own_sentinels(base)
        print(f"  the first {kept:,} ids come from {extended_by(flags)}; {_ID_MAP} maps the rest")
    print(fit.table(list(measured.items())))
    print(weighting.next_build(flags, corpora, output))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
