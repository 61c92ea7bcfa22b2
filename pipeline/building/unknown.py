"""Unknown tokens of a build: how many there are, and which characters they stand for."""

from collections import Counter
from collections.abc import Sequence

from pipeline.building import graph
from tasks.cache.manifest import Shard
from tasks.reading import sources
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary

_WARNED = 0.01  # share of tokens; texts that a vocabulary was made for have less
_READ_CHARACTERS = 1 << 20
_NAMED = 8


def share(shards: Sequence[Shard]) -> float:
    """Returns the share of unknown tokens in shards, 0 for those of older releases."""
    tokens = sum(shard.text_tokens for shard in shards)
    return sum(shard.unknown_tokens or 0 for shard in shards) / max(tokens, 1)


def check(found: float, limit: float, job: graph.Job, loaded: Vocabulary) -> None:
    """Prints a warning about a share of unknown tokens; raises UserError if it is over `limit`."""
    if found < _WARNED:
        return
    line = (
        f"{found:.1%} of the tokens are unknown: the vocabulary cannot spell {_lost(job, loaded)}. "
        "A model cannot read or write these"
    )
    if found <= limit:
        print(f"warning: {line}")
        return
    raise UserError(
        f"{line}, more than --max_unknown={limit}: take a vocabulary made for such texts "
        "(vocab.train --byte_fallback spells all of them), or raise the limit and run again; "
        "finished shards are kept"
    )


def _lost(job: graph.Job, loaded: Vocabulary) -> str:
    """Returns the characters most often lost at the beginning of the corpus, for a message."""
    batches = (batch for piece in job.corpus.pieces for _, batch in sources.read(job.corpus, piece))
    counts = Counter[str]()
    for batch in batches:
        for name in job.corpus.spec.unit.columns:
            for text in filter(None, batch.column(name).to_pylist()):
                counts.update(text)
        if counts.total() > _READ_CHARACTERS:
            break
    special = loaded.special
    lost = [
        repr(each)
        for each, _ in counts.most_common()
        if not each.isspace() and special.of_unknown_text in loaded.encode([each])[0]
    ]
    if "\n" in counts and "\n" not in loaded.decode(loaded.encode(["a\nb"])[0]):
        lost.insert(_NAMED - 1, "line ends, which become spaces")
    return ", ".join(lost[:_NAMED]) or "some of their characters"
