"""Text that a build's vocabulary cannot spell: how much there is, and which characters."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.building import graph
from pipeline.building.lost_text import BYTES
from tasks.cache.manifest import Shard
from tasks.reading import sources
from tasks.reading.corpus import HUB
from tasks.storage import files
from tasks.terminal.command_line import UserError
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


def share(shards: Sequence[Shard]) -> Share:
    """Returns the largest share of unknown tokens, of lost text, or of sides that are all lost.

    It is 0 for shards of older releases.
    """
    totals = Counter[str]()
    for shard in shards:
        totals.update(shard.lost or {})
    tokens = sum(shard.text_tokens for shard in shards)
    size = sum(shard.text_bytes for shard in shards)
    documents = sum(shard.documents for shard in shards)
    unknown = sum(shard.unknown_tokens or 0 for shard in shards)
    found = [
        Share(unknown / max(tokens, 1), "the tokens are unknown"),
        Share(totals.pop(BYTES, 0) / max(size, 1), "the text's bytes become unknown tokens"),
    ]
    for column, count in totals.items():
        what = "documents" if column == "text" else column
        found.append(Share(count / max(documents, 1), f"the {what} hold unknown tokens alone"))
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
    counts, characters = Counter[str](), 0
    for text in _texts(job):
        counts.update(text)
        characters += len(text)
        if characters > _READ_CHARACTERS:
            break
    special = loaded.special
    lost = [
        repr(each)
        for each, _ in counts.most_common()
        if not each.isspace() and special.of_unknown_text in loaded.encode([each])[0]
    ]
    if "\n" in counts and not _has_line_ends(loaded):
        lost.insert(_NAMED - 1, "line ends, which become spaces")
    return ", ".join(lost[:_NAMED]) or "some of their characters"
