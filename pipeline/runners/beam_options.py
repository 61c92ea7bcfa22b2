"""Beam's own flags: rejects unsafe runners and unknown flags."""

import logging
from typing import Any

from tasks.terminal.command_line import EXIT_USER_ERROR, Parser, UserError, nearest

_IN_PROCESS = "FnApiRunner"
_REJECTED = {
    "DirectRunner": "it first tries to download and use Prism; use FnApiRunner, to which it falls "
    "back",
    "SwitchingDirectRunner": "it first tries to download and use Prism",
    "PrismRunner": "it downloads a program, and builds were never tested with it",
    "DaskRunner": "it silently dropped elements in tests",
}
# Flags that are sometimes given to the wrong command.
OF_PRETRAIN = (
    "batch_size",
    "gin_file",
    "init_from",
    "lengths.inputs",
    "lengths.targets",
    "microbatches",
    "model_dir",
    "optimizer.learning_rate",
    "optimizer_preset",
    "preset",
    "seed",
    "tokens_per_batch",
    "train_steps",
)


def parsed(parser: Parser, argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns a command's own flags by name, and Beam's arguments; raises as `arguments` does."""
    parser.refuse_others = lambda given: reject_unknown(parser, given)
    known, rest = parser.parse_known_args(argv)
    return vars(known), arguments(parser, rest, known.runner, known.workers)


def arguments(parser: Parser, given: list[str], runner: str, workers: int) -> list[str]:
    """Returns Beam's arguments: the runner, its workers, and the `given` flags that are not ours.

    Beam silently ignores flags that it does not know; here they are errors.

    Raises:
      UserError: the runner or mode loses data or downloads a program.
      SystemExit: neither this command nor Beam knows a flag.
    """
    name = runner.rsplit(".", 1)[-1]
    if name in _REJECTED:
        raise UserError(f"--runner={runner} is refused: {_REJECTED[name]}")
    if any("multi_threading" in argument for argument in given):
        raise UserError(
            "--direct_running_mode=multi_threading loses elements silently and reports success "
            "(in 11 of 23 large test runs); use --workers=N, which starts processes"
        )
    reject_unknown(parser, given)
    if workers == 1:
        return [f"--runner={runner}", *given]
    if name != _IN_PROCESS:
        raise UserError(f"--workers is for {_IN_PROCESS} only: use the flags of {runner} instead")
    mode = ["--direct_running_mode=multi_processing", f"--direct_num_workers={workers}"]
    return [f"--runner={runner}", *mode, *given]


def import_beam() -> Any:
    """Imports and returns apache_beam, without its warning that `gcp` is not installed."""
    logging.disable(logging.WARNING)
    try:
        import apache_beam
    finally:
        logging.disable(logging.NOTSET)
    return apache_beam


def reject_unknown(parser: Parser, given: list[str]) -> None:
    """Exits with an error that names the first of the `given` flags that Beam does not know."""
    if not given:
        return
    import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    beam: Any = Parser(prog=parser.prog, add_help=False, conflict_handler="resolve")
    for group in PipelineOptions.__subclasses__():
        group._add_argparse_args(beam)  # as PipelineOptions itself does
    unknown = beam.parse_known_args(given)[1]
    if unknown:
        flag = unknown[0].split("=")[0]
        hint = nearest(flag, [*parser._option_string_actions, *beam._option_string_actions])
        if flag.removeprefix("--") in OF_PRETRAIN:
            hint = " (it is a flag of trainer.pretrain)"
        parser.exit(EXIT_USER_ERROR, f"{parser.prog}: error: unknown flag {flag}{hint}\n")
