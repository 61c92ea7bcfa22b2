"""Cuts a vocabulary to the pieces that a corpus needs.

    palimpsest vocab trim --vocabulary=mt5-small --corpus='parquet:ro/*.parquet' --output=DIR

Writes the smaller vocabulary, of the same kind and with the same special ids, report.json,
manifest.json and id_map.json, which maps each old id to its new id or null.
"""

import dataclasses
from typing import Any

from tasks import vocabulary
from tasks.annexes.trimming import pieces, usage
from tasks.cache.manifest import MANIFEST, as_json
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.vocabularies import tokenizer_json
from vocab import fit, folder

_ID_MAP, _REPORT = "id_map.json", "report.json"
# In the order written; the first file marks the folder as this command's.
_FILES = (_ID_MAP, _REPORT, *vocabulary.VOCABULARY_FILES, tokenizer_json.CONFIGS[0])


def trim(
    base: vocabulary.Vocabulary,
    corpus: sources.Corpus,
    output: str,
    min_count: int = 1,
    vocab_size: int | None = None,
    workers: int = 1,
) -> vocabulary.Vocabulary:
    """Writes the trimmed `base` to the folder `output` and returns it; keeps a finished one.

    A piece is kept if it occurs `min_count` times in `corpus`; `vocab_size` limits the number of
    pieces, without sentinels.
    """
    options = {"base": base.record.sha256, "min_count": min_count, "vocab_size": vocab_size}
    made: dict[str, Any] = {"options": options, "corpus": corpus.record}
    if before := folder.finished(output, options, corpus.record):
        if before["model"]["extra_ids"] != base.record.extra_ids:
            raise UserError(
                f"--output={output} holds a vocabulary with a different --extra_ids: choose "
                "another folder"
            )
        print(f"the vocabulary is already finished: {output}")
        return vocabulary.load(output, base.record.added_sentinels)
    counts = usage.count(base, corpus, workers)
    found = pieces.trim(base, counts, min_count, vocab_size)
    with folder.claimed(output, _FILES) as held:
        print(pieces.described(base, found, counts))
        left = found.vocabulary
        files.write_json(files.join(output, _ID_MAP), found.id_map)
        files.write_json(files.join(output, _REPORT), fit.measure(left, corpus).as_dict())
        if not left.is_sentencepiece:
            # An EOS that has no piece is not named in the file.
            named = {
                f"{role}_token": piece
                for role, piece in left.special_pieces().items()
                if getattr(left.special, role) < left.record.pieces
            }
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
            files.write_json(files.join(output, tokenizer_json.CONFIGS[0]), config)
        files.write_bytes(files.join(output, left.record.file_name), left.model)
        held.check()
        files.write_json(files.join(output, MANIFEST), {"model": as_json(left.record), **made})
    return left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    vocabulary: str = field(REQUIRED, f"vocabulary to cut: {vocabulary.FORMS}", metavar="PATH")
    extra_ids: int = field(0, "sentinels to add to a vocabulary that has none; 100 for T5")
    corpus: str = field(REQUIRED, f"text whose pieces are kept: {sources.forms()}", metavar="SPEC")
    output: str = field(REQUIRED, "folder to write, local or remote", metavar="DIR")
    min_count: int = field(1, "minimum occurrences of a kept piece", rule=at_least(1))
    vocab_size: int | None = field(
        None, "maximum number of pieces, without sentinels; None sets no limit", rule=at_least(1)
    )
    workers: int = field(1, "number of processes that count pieces", rule=at_least(1))


def run(flags: Flags) -> None:
    """Trims, and prints a report."""
    base = vocabulary.load(flags.vocabulary, flags.extra_ids)
    corpus = sources.resolve(sources.parse(flags.corpus))
    for note in corpus.notes:
        print(note)
    trim(base, corpus, flags.output, flags.min_count, flags.vocab_size, flags.workers)
    print(fit.Report.from_dict(files.read_json(files.join(flags.output, _REPORT))))


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
