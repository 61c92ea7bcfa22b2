"""Makes sets of questions from texts, for trainer.evaluate --suite.

    palimpsest make_questions --corpus=SPEC --output=FOLDER [--kinds=cloze,order] [--count=200]

Writes FOLDER/KIND.jsonl for each kind: cloze (spans of one to three words), long_cloze (words that
occur 9 to 256 words before), order (two words exchanged), copying (lists of words), arithmetic,
text (for bits per byte), and, if it is named, seen: words of the validation split between
neighbours that the training split has three times or more, always with one word between them.
"""

import dataclasses

from tasks.reading.corpus import VALIDATION
from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field

_KINDS = ("cloze", "long_cloze", "order", "copying", "arithmetic", "text")
_ALL = (*_KINDS, "seen")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    corpus: str = field(REQUIRED, "texts, as in pipeline.build", metavar="SPEC")
    output: str = field(REQUIRED, "folder to write to", metavar="FOLDER")
    kinds: tuple[str, ...] = field(_KINDS, f"kinds of questions, of {', '.join(_ALL)}")
    documents: int = field(
        20_000, "documents to read, from the beginning of the corpus", rule=at_least(1)
    )
    count: int = field(
        200,
        "questions of each kind, if the texts have them; rounded up to equal groups",
        rule=at_least(1),
    )
    wrong: int = field(
        3, "wrong choices of a question; order has one, short lists fewer", rule=at_least(1)
    )
    seed: int = field(0, "seed of what is drawn")


def run(flags: Flags) -> None:
    """Writes the files."""
    from tasks.annexes.making_questions import making
    from tasks.annexes.questions import question, sets

    unknown = [each for each in flags.kinds if each not in making.KINDS]
    if unknown or not flags.kinds:
        raise UserError(f"--kinds={','.join(unknown)}: choose among {', '.join(_ALL)}")
    rows = sets.rows_with_splits(flags.corpus, flags.documents)
    found = [(split, row["text"]) for split, row in rows if "text" in row]
    texts = [text for _, text in found]
    held_out = [number for number, (split, _) in enumerate(found) if split == VALIDATION]
    for kind in flags.kinds:
        made = making.make(kind, texts, flags.count, flags.wrong, flags.seed, held_out)
        path = files.join(flags.output, f"{kind}.jsonl")
        if not made:
            needs = "words with spaces between them"
            if kind == "seen":
                needs = "a validation split with words that the training split gives"
            raise UserError(
                f"--corpus={flags.corpus} has too little text for {kind} with "
                f"--wrong={flags.wrong}, which needs {needs}: leave it out of --kinds, or lower "
                "--wrong"
            )
        files.make_folder(flags.output)
        question.write(path, made)
        print(f"{path}: {len(made):,} questions")


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
