"""Generates text after prompts.

    python -m trainer.generate --model_dir=DIR --prompt=TEXT
    python -m trainer.generate --model_dir=DIR --input=FILE --output=FILE.jsonl

A file of prompts is text with one prompt per line, or JSON lines with a text in --column. The
output has one line per prompt, in order: the prompt and its results. After a kill, the same command
continues and writes the same output. Input and output are local or remote.
"""

import dataclasses

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field
from trainer.config.decoding import Decoding, TrainedFlags
from trainer.config.processes import SEVERAL_HOSTS, ProcessesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(TrainedFlags):
    """Flags of the command."""

    prompt: tuple[str, ...] = field(
        (),
        "texts to continue; they may have sentinels such as <extra_id_0>",
        repeated=True,
        positional=True,
    )
    input: str | None = field(
        None, "file of prompts: lines of text, or JSON lines if its name ends in .jsonl"
    )
    column: str = field("text", "field of a JSON line that holds the prompt")
    output: str | None = field(None, "JSON lines file or URL to write; must not exist")
    decoding: Decoding = field(Decoding, "how tokens are chosen", flat=True)
    processes: ProcessesConfig = field(ProcessesConfig, SEVERAL_HOSTS)


def run(flags: Flags) -> None:
    """Prints or writes the results."""
    if bool(flags.prompt) == (flags.input is not None):
        raise UserError("give either --prompt or --input")
    if (flags.input is None) != (flags.output is None):
        raise UserError("--input and --output belong together")

    from trainer.engine import processes
    from trainer.inference import prompts

    with processes.joined(flags.processes):
        if flags.input is not None and flags.output is not None:
            prompts.write_all(flags, flags.decoding, flags.input, flags.column, flags.output)
            return
        generator = prompts.generator_of(flags, flags.decoding)
        for found in generator([generator.ids(prompt) for prompt in flags.prompt]):
            print(generator.text(found.ids))


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
