"""Shows the documents behind a batch of a run.

    palimpsest explain --model_dir=DIR --step=41217 [--row=3] [--output=FILE.html]
    palimpsest explain --model_dir=DIR[,DIR…] --document=ID    which steps saw a document

It reads the run's config.json and caches, and needs neither a checkpoint nor an accelerator.
"""

import dataclasses

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, ReadIf, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    model_dir: str = field(
        REQUIRED,
        "folder of the run, local or remote; with --document, several, separated by commas",
        joined=",",
        bare=True,
    )
    step: int | None = field(
        None, "update to explain, numbered as in metrics.jsonl", aliases=("steps",)
    )
    document: str | None = field(
        None,
        "instead of --step: id of a document, or @FILE with one id per line; prints the rows that "
        "held it at any step, even if a takedown has since removed it",
    )
    row: int | None = field(
        None,
        "row of the batch, from 0; None: one line for each row",
        read_if=ReadIf(lambda flags: flags.document is None, "with --document"),
    )
    cache_dir: str | None = field(None, "folder of the tasks' caches, if they have moved")
    output: str | None = field(
        None,
        "HTML file to write instead of printing, local or remote",
        metavar="FILE",
        aliases=("html",),
        read_if=ReadIf(lambda flags: flags.document is None, "with --document"),
    )


def run(flags: Flags) -> None:
    """Prints or writes the documents."""
    if (flags.step is None) == (flags.document is None):
        raise UserError("give --step or --document")
    if flags.document is not None:
        from trainer.annexes.comparing.document_steps import print_sightings

        print_sightings(flags.model_dir, flags.document, flags.cache_dir)
        return

    from tasks.annexes.inspecting import show
    from trainer.annexes.comparing.explanation import Explanation

    assert flags.step is not None
    explanation = Explanation(flags.model_dir, flags.step, flags.cache_dir)
    places = explanation.examples_of(flags.row)
    if flags.row is None and not flags.output:
        if explanation.skipped:
            print(explanation.skipped)
        for place in places:
            print(explanation.line(*place))
        return
    samples = [explanation.sample(*place) for place in places]
    if not flags.output:
        show.print_samples(samples, explanation.ids)
        return
    title = f"{flags.model_dir}: step {flags.step:,}"
    files.write_bytes(flags.output, show.page(title, samples, explanation.ids).encode())
    print(f"{flags.output}: {len(samples)} rows")


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
