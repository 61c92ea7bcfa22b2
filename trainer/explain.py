"""Shows the documents and text behind one batch of a run, and the examples made from them.

python -m trainer.explain --model_dir=DIR --step=41217 [--row=3] [--output=FILE.html]
python -m trainer.explain --model_dir=DIR[,DIR…] --document=ID      which steps saw a document

Reads the run's config.json and its caches; needs neither a checkpoint nor an accelerator.
"""

import sys

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m trainer.explain", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--model_dir",
        required=True,
        help="folder of the run, local or remote; with --document, several, separated by commas",
    )
    add("--step", type=int, help="update to explain, counted as in metrics.jsonl")
    add(
        "--document",
        help="instead of --step: id of a document, or @FILE with ids, one a line; prints the rows "
        "of every step that held it, also if a takedown has removed it since",
    )
    add("--row", type=int, help="row of the batch, from 0; prints one line per row if left out")
    add("--cache_dir", help="folder of caches by task, if they were moved after training")
    add("--output", "--html", help="HTML page to write instead of printing, local or remote")
    flags = parser.parse_args(argv)
    if (flags.step is None) == (flags.document is None):
        parser.error("give --step, or --document")
    if flags.document:
        from trainer.comparing.document_steps import print_sightings

        if flags.row is not None or flags.output:
            parser.error("--row and --output are for --step")
        print_sightings(flags.model_dir, flags.document, flags.cache_dir)
        return

    from tasks.inspection import show
    from trainer.comparing.explanation import Explanation

    explanation = Explanation(flags.model_dir, flags.step, flags.cache_dir)
    if flags.row is None and not flags.output:
        for row in range(len(explanation)):
            for example in range(explanation.examples(row)):
                print(explanation.line(row, example))
        return
    rows = range(len(explanation)) if flags.row is None else [flags.row]
    samples = [
        explanation.sample(row, example)
        for row in rows
        for example in range(explanation.examples(row))
    ]
    if not flags.output:
        show.print_samples(samples, explanation.ids)
        return
    title = f"{flags.model_dir}: step {flags.step:,}"
    files.write_bytes(flags.output, show.page(title, samples, explanation.ids).encode())
    print(f"{flags.output}: {len(samples)} rows")


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
