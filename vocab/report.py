"""How well a vocabulary fits a corpus: `python -m vocab.report --vocabulary=DIR --corpus=SPEC`."""

import dataclasses
import hashlib
from typing import Any

from tasks import command_line, sources, vocabulary
from tasks.command_line import UserError

SAMPLE_BYTES = 2_000_000


@dataclasses.dataclass(frozen=True)
class Report:
    """Counts over a sample of held-out text; words are what white space separates."""

    split: str
    documents: int
    bytes: int
    words: int
    tokens: int
    unknown_tokens: int
    byte_tokens: int
    pieces_used: int
    pieces: int

    @property
    def tokens_per_word(self) -> float:
        """Fertility."""
        return self.tokens / max(self.words, 1)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text that a token stands for."""
        return self.bytes / max(self.tokens, 1)

    @property
    def unknown_rate(self) -> float:
        """Share of tokens that are <unk>: characters that the vocabulary cannot write."""
        return self.unknown_tokens / max(self.tokens, 1)

    @property
    def byte_rate(self) -> float:
        """Share of tokens that are single bytes of characters without a piece."""
        return self.byte_tokens / max(self.tokens, 1)

    @property
    def used_share(self) -> float:
        """Share of the pieces of text that the sample uses."""
        return self.pieces_used / max(self.pieces, 1)

    def as_dict(self) -> dict[str, Any]:
        """Counts and rates, as report.json holds them."""
        rates = ("tokens_per_word", "bytes_per_token", "unknown_rate", "byte_rate", "used_share")
        return dataclasses.asdict(self) | {name: round(getattr(self, name), 6) for name in rates}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Report":
        """Inverse of `as_dict`."""
        return cls(**{field.name: value[field.name] for field in dataclasses.fields(cls)})

    def __str__(self) -> str:
        where = "held-out text" if self.split == sources.VALIDATION else "train (none is held out)"
        rows = (
            ("measured on", where),
            ("documents", f"{self.documents:,}"),
            ("bytes", f"{self.bytes:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("tokens a word", f"{self.tokens_per_word:.3f}"),
            ("bytes a token", f"{self.bytes_per_token:.3f}"),
            ("unknown tokens", f"{self.unknown_rate:.4%}"),
            ("byte-fallback tokens", f"{self.byte_rate:.4%}"),
            ("pieces used", f"{self.pieces_used:,} of {self.pieces:,} ({self.used_share:.1%})"),
        )
        return "\n".join(f"  {name:<22}{value}" for name, value in rows)


def measure(loaded: vocabulary.Vocabulary, corpus: sources.Corpus) -> Report:
    """Measures on at most about `SAMPLE_BYTES` of validation, or of train where there is none.

    The sample is of whole documents, from pieces in the order of a hash of their names: the same in
    every run, and from all over the corpus.

    Raises:
      UserError: the corpus has no documents.
    """
    for split in (sources.VALIDATION, sources.TRAIN):
        if texts := _texts(corpus, split):
            break
    else:
        raise UserError(f"corpus {corpus.spec} has no documents")
    encoded = loaded.encode(texts)
    counts: dict[int, int] = {}
    for ids in encoded:
        for token in ids.tolist():
            counts[token] = counts.get(token, 0) + 1
    processor = loaded.processor
    of_text = range(loaded.size - loaded.record.sentinels)
    written = {token for token in of_text if not processor.is_control(token)}
    written -= {processor.unk_id()}
    return Report(
        split=split,
        documents=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        words=sum(len(text.split()) for text in texts),
        tokens=sum(counts.values()),
        unknown_tokens=counts.get(processor.unk_id(), 0),
        byte_tokens=sum(count for token, count in counts.items() if processor.is_byte(token)),
        pieces_used=len(written & counts.keys()),
        pieces=len(written),
    )


def _texts(corpus: sources.Corpus, split: str) -> list[str]:
    pieces = [piece for piece in corpus.pieces if split in piece.splits]
    pieces.sort(key=lambda piece: hashlib.sha256(piece.name.encode()).digest())
    texts: list[str] = []
    size = 0
    for piece in pieces:
        for of_split, batch in sources.read(corpus, piece):
            if of_split != split:
                continue
            for text in batch.column("text").to_pylist():
                if text:
                    texts.append(text)
                    size += len(text.encode())
                    if size >= SAMPLE_BYTES:
                        return texts
    return texts


def main(argv: list[str]) -> None:
    """The command."""
    parser = command_line.Parser(prog="python -m vocab.report", description=__doc__)
    parser.add_argument("--vocabulary", required=True, help="folder or .model file")
    parser.add_argument("--corpus", required=True, help=sources.FORMS)
    parser.add_argument("--extra_ids", type=int, default=0, help="sentinels to add to the model's")
    flags = parser.parse_args(argv)
    loaded = vocabulary.load(flags.vocabulary, flags.extra_ids)
    corpus = sources.resolve(sources.parse(flags.corpus))
    print(f"{flags.vocabulary} on {corpus.spec} (sha256 {loaded.record.sha256[:12]})")
    print(measure(loaded, corpus))


if __name__ == "__main__":
    command_line.run(main)
