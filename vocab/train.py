"""Trains a SentencePiece vocabulary on a sample of a whole corpus.

    python -m vocab.train --corpus=python_docs --vocab_size=32000 --output=DIR

DIR receives sentencepiece.model and .vocab, report.json and, last, manifest.json. The model has
T5's ids and normalisation, and its last pieces are the sentinels, <extra_id_0> the very last, so
that T5X reads it with `extra_ids = 0`. Equal flags and corpus give equal bytes on any machine.
"""

import dataclasses
import importlib.metadata
import io
import multiprocessing
import os
import platform
import re
import shlex
import tempfile
from collections import Counter
from typing import Any

from tasks import command_line, files, progress, sources, vocabulary
from tasks.command_line import UserError
from tasks.manifest import MANIFEST, VOCABULARY
from vocab import report
from vocab.sample import PASSAGE_CHARACTERS, Sample

REPORT = "report.json"
PIECES = "sentencepiece.vocab"
FORMAT = 1

# SentencePiece's sums depend on how many threads share them, so the number is part of the result:
# fixed, and enough for a workstation.
_THREADS = 16


@dataclasses.dataclass(frozen=True)
class Options:
    """What, with the corpus, determines a vocabulary."""

    vocab_size: int
    extra_ids: int = 100
    model_type: str = "unigram"
    character_coverage: float = 0.9995
    byte_fallback: bool = False
    sample_bytes: int = 128_000_000
    seed: int = 0


def train(options: Options, corpus: sources.Corpus, output: str) -> vocabulary.Vocabulary:
    """Writes the vocabulary to `output` and returns it; keeps one that is finished there.

    Raises:
      UserError: `output` holds another vocabulary or cannot be written; the corpus has no text; or
        SentencePiece refuses, such as a vocabulary too large for the corpus.
    """
    if kept := _finished(options, corpus, output):
        return kept
    _claim(output)
    sample, problems, documents = _read(options, corpus)
    with progress.shown(f"training {options.vocab_size:,} pieces", None):
        learned = _train(options, sample.passages())
    known = "all of train" if sample.seen == len(sample) else f"of {sample.seen:,} in train"
    print(f"sample: {len(sample):,} passages ({known}), {sample.bytes:,} bytes")
    model = add_sentinels(learned, options.extra_ids)
    loaded = vocabulary.from_bytes(model)
    _verify(loaded, options)
    measured = report.measure(loaded, corpus)
    # The report comes first: it marks an unfinished folder as ours (see `_claim`).
    files.write_json(files.join(output, REPORT), measured.as_dict())
    files.write_bytes(files.join(output, VOCABULARY), model)
    files.write_bytes(files.join(output, PIECES), _pieces_text(loaded))
    manifest = {
        "format": FORMAT,
        "model": dataclasses.asdict(loaded.record),
        "options": dataclasses.asdict(options),
        "corpus": corpus.record,
        "sample": {
            "documents": documents,
            "documents_left_out": dict(sorted(problems.items())),
            "passages": len(sample),
            "bytes": sample.bytes,
            "passages_in_train": sample.seen,
            "bytes_in_train": sample.seen_bytes,
        },
        "software": {
            "sentencepiece": importlib.metadata.version("sentencepiece"),
            "python": platform.python_version(),
        },
    }
    files.write_json(files.join(output, MANIFEST), manifest)
    print(f"vocabulary is written: {output} (sha256 {loaded.record.sha256[:12]})")
    return loaded


def _finished(
    options: Options, corpus: sources.Corpus, output: str
) -> vocabulary.Vocabulary | None:
    path = files.join(output, MANIFEST)
    if not files.exists(path):
        return None
    manifest = files.read_json(path)
    ours = {**dataclasses.asdict(options), **corpus.record}
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


def _claim(output: str) -> None:
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


def _read(options: Options, corpus: sources.Corpus) -> tuple[Sample, Counter[str], int]:
    """Reads all of train; returns the sample, counts of unusable documents, and of usable ones."""
    pieces = [piece for piece in corpus.pieces if sources.TRAIN in piece.splits]
    total = sum(piece.bytes for piece in pieces)
    sample = Sample(options.sample_bytes, options.seed)
    problems: Counter[str] = Counter()
    documents = done = 0
    with progress.shown(f"reading {corpus.spec}", total, unit="B") as bar:
        for piece in pieces:
            inside = 0
            for split, batch in sources.read(corpus, piece):
                inside += batch.nbytes
                bar.update(done + min(inside, piece.bytes))
                if split != sources.TRAIN:
                    continue
                columns = (batch.column(name).to_pylist() for name in ("id", "text", "problem"))
                for id, text, problem in zip(*columns, strict=True):
                    if problem:
                        problems[problem] += 1
                    else:
                        documents += 1
                        sample.add(id, text)
            done += piece.bytes
    if not len(sample):
        found = ", ".join(f"{count:,} × {problem}" for problem, count in problems.items())
        raise UserError(
            f"corpus {corpus.spec} has no text in train"
            + (f" (left out: {found})" if found else "")
        )
    return sample, problems, documents


def _train(options: Options, passages: list[str]) -> bytes:
    """Trains in a process of its own: SentencePiece holds the interpreter lock throughout, writes
    to stderr, and exits where it meets what it did not expect.

    Raises:
      UserError: SentencePiece's reason, or that it died.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, passages, options)
    child = context.Process(target=_train_in_child, args=arguments, daemon=True)
    child.start()
    sender.close()
    try:
        model, reason = receiver.recv()
    except EOFError:
        reason = (
            "it died: memory was short (lower --sample_bytes), or normalisation left nothing of "
            "the text"
        )
    finally:
        child.terminate()
        child.join()
    if reason:
        raise UserError(f"SentencePiece cannot make this vocabulary: {reason}")
    return model


def _train_in_child(sender: Any, passages: list[str], options: Options) -> None:
    import sentencepiece

    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 2)
    model = io.BytesIO()
    reason = ""
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(passages),
            model_writer=model,
            model_type=options.model_type,
            vocab_size=options.vocab_size,
            character_coverage=options.character_coverage,
            byte_fallback=options.byte_fallback,
            normalization_rule_name="nmt_nfkc",
            max_sentence_length=4 * PASSAGE_CHARACTERS,
            pad_id=vocabulary.PAD_ID,
            eos_id=vocabulary.EOS_ID,
            unk_id=vocabulary.UNK_ID,
            bos_id=-1,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        # "Internal: src/file.cc(1) [condition] What a person can use."
        reason = re.sub(r"^.*?\.cc\(\d+\) \[.*?\] (?=\S)", "", str(error)) or "no reason given"
    sender.send((model.getvalue(), reason))


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
        prog="python -m vocab.train", description="Trains a SentencePiece vocabulary on a corpus."
    )
    add = parser.add_argument
    add("--corpus", required=True, help=sources.FORMS)
    add("--output", required=True, help="folder for the vocabulary, local or any fsspec URL")
    add("--vocab_size", type=int, default=32000, help="pieces, without the sentinels")
    add("--extra_ids", type=int, default=Options.extra_ids, help="sentinels, as the last pieces")
    add("--model_type", choices=("unigram", "bpe"), default=Options.model_type, help="algorithm")
    add("--character_coverage", type=float, default=Options.character_coverage,
        help="share of the corpus's characters that get a piece")  # fmt: skip
    add("--byte_fallback", action="store_true",
        help="write characters without a piece as bytes instead of <unk>")  # fmt: skip
    add("--sample_bytes", type=int, default=Options.sample_bytes,
        help="bytes of text to train on, sampled from all of train; takes about 20 times as much "
        "memory")  # fmt: skip
    add("--seed", type=int, default=Options.seed, help="chooses the sample")
    return parser


def main(argv: list[str]) -> None:
    """The command."""
    flags = vars(_parser().parse_args(argv))
    spec, output = sources.parse(flags.pop("corpus")), flags.pop("output")
    options = Options(**flags)
    for name in ("vocab_size", "sample_bytes"):
        if getattr(options, name) <= 0:
            raise UserError(f"--{name}={getattr(options, name)} must be more than 0")
    if options.extra_ids < 0:
        raise UserError(f"--extra_ids={options.extra_ids} must not be negative")
    loaded = train(options, sources.resolve(spec), output)
    measured = report.Report.from_dict(files.read_json(files.join(output, REPORT)))
    task = "python_docs" if spec.kind == "python_docs" else "rlm"
    print(f"{loaded.size:,} ids: {options.vocab_size:,} pieces, {options.extra_ids} sentinels")
    print(measured)
    print(
        f"next: python -m pipeline.build --task={task}_span_corruption "
        f"--corpus={shlex.quote(str(spec))} --vocabulary={shlex.quote(output)} --cache_dir=DIR"
    )


if __name__ == "__main__":
    command_line.run(main)
