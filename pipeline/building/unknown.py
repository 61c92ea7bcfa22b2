"""Text that a build's vocabulary cannot spell: how much there is, and which characters."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.building import graph
from tasks.cache.manifest import ALONE, BYTES, TOKENS, Shard
from tasks.document_kind import SIDES, DocumentKind
from tasks.reading import sources
from tasks.reading.corpus import HUB
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabularies.sentencepiece_model import SPACE
from tasks.vocabulary import Vocabulary

_WARNED = 0.01  # texts that a vocabulary was made for lose less
_READ_CHARACTERS = 1 << 20
_NAMED = 8
# A line end, with the indent of the next line; a share of indents that prose and tables lack.
_LINE = re.compile(r"\n([ \t]*)(?=\S)")
_INDENTED = 0.2


class Share(NamedTuple):
    """The largest share of what a vocabulary cannot spell, from 0 to 1, and of what it is."""

    share: float
    what: str

    def __str__(self) -> str:
        return f"{self.share:.1%} of {self.what}"


class Shares(NamedTuple):
    """The shares of a column, from 0 to 1."""

    tokens: float  # of tokens, unknown ones
    bytes: float  # of text, what these stand for
    alone: float  # of documents, those that hold nothing else


def columns(shards: Sequence[Shard]) -> tuple[str, ...]:
    return (
        DocumentKind.PAIR if any(shard.pairs for shard in shards) else DocumentKind.TEXT
    ).columns


def shares(shards: Sequence[Shard], column: str) -> Shares:
    """Returns the shares of a column; shards of older releases, which lack counts, are left out."""
    lost, tokens, size, documents = Counter[str](), 0, 0, 0
    for shard in shards:
        if not (pairs := shard.pairs):
            of_tokens, of_bytes = shard.text_tokens, shard.text_bytes
        elif pairs.inputs_bytes is None or pairs.targets_bytes is None:
            continue
        elif column == SIDES[0]:
            of_tokens, of_bytes = pairs.inputs_tokens, pairs.inputs_bytes
        else:
            of_tokens, of_bytes = shard.text_tokens - pairs.inputs_tokens, pairs.targets_bytes
        lost.update(shard.lost or {})
        tokens, size, documents = tokens + of_tokens, size + of_bytes, documents + shard.documents
    totals = {TOKENS: tokens, BYTES: size, ALONE: documents}
    return Shares(*(lost[f"{column} {what}"] / max(of, 1) for what, of in totals.items()))


def share(shards: Sequence[Shard]) -> Share:
    """Returns the largest share, of any column."""
    found = []
    for column in columns(shards):
        of = shares(shards, column)
        owner = f"{column}'s" if column == "text" else f"{column}'"
        found += [
            Share(of.tokens, f"the {owner} tokens are unknown"),
            Share(of.bytes, f"the {owner} bytes become unknown tokens"),
            Share(of.alone, f"the {column.replace('text', 'texts')} hold unknown tokens alone"),
        ]
    return max(found)


def check(found: Share, limit: float, job: graph.Job, loaded: Vocabulary) -> None:
    """Prints a warning about what cannot be spelt; raises UserError if it is over `limit`."""
    if found.share < min(_WARNED, limit) or not found.share:
        if _loses_indents(job, loaded):
            print(
                "warning: texts have indented lines, but the vocabulary has no line ends, which "
                "become spaces: code and such texts cannot be written again"
            )
        return
    line = (
        f"{found}: the vocabulary cannot spell {_lost(job, loaded)}. A model cannot read or write "
        "these"
    )
    if found.share <= limit:
        print(f"warning: {line}")
        return
    raise UserError(
        f"{line}, more than --max_unknown={limit}: take a vocabulary made for such texts "
        "(vocab.train --byte_fallback spells all of them), or raise the limit and run again; "
        "finished shards are kept"
    )


def _texts(job: graph.Job) -> Iterator[str]:
    """Yields the texts of the corpus, all columns of each batch."""
    for piece in job.corpus.pieces:
        for _, batch in sources.read(job.corpus, piece):
            for name in job.corpus.spec.unit.columns:
                yield from filter(None, (value.as_py() for value in batch.column(name)))


def _has_line_ends(loaded: Vocabulary) -> bool:
    return "\n" in loaded.decode(loaded.encode(["a\nb"])[0])


def _loses_indents(job: graph.Job, loaded: Vocabulary) -> bool:
    """Returns whether local texts begin with lines, many of them indented, that become spaces."""
    spec = job.corpus.spec
    if spec.kind == HUB or files.is_remote(spec.location) or _has_line_ends(loaded):
        return False
    characters, counts = 0, Counter[bool]()
    for text in _texts(job):
        counts.update(found[1] != "" for found in _LINE.finditer(text))
        characters += len(text)
        if characters > _READ_CHARACTERS:
            break
    return counts[True] > _INDENTED * counts.total() > 0


def _lost(job: graph.Job, loaded: Vocabulary) -> str:
    """Returns the characters most often lost at the beginning of the corpus, for a message."""
    counts, characters, has_lines = Counter[str](), 0, False
    for text in _texts(job):
        lost_here = loaded.codec.normalize(loaded.unknown_text(text))
        counts.update(unicodedata.normalize("NFC", lost_here))  # as in the corpus, not in parts
        has_lines |= "\n" in text
        characters += len(text)
        if characters > _READ_CHARACTERS:
            break
    named = [each for each, _ in counts.most_common() if not each.isspace() and each != SPACE]
    # Of a lost word, those that are lost alone, if there are any.
    unknown = loaded.special.of_unknown_text
    single = [each for each in named if unknown in loaded.encode([each])[0]] or named
    lost = [repr(each) for each in single[:_NAMED]]
    if has_lines and not _has_line_ends(loaded):
        lost.insert(_NAMED - 1, "line ends, which become spaces")
    return ", ".join(lost[:_NAMED]) or "some of their characters"
