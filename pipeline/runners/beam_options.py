"""Beam's own flags: which runners are safe, and which flags exist."""

import logging
from typing import Any

from tasks.terminal.command_line import EXIT_USER_ERROR, Parser, UserError, nearest

_IN_PROCESS = "FnApiRunner"
_REFUSED = {
    "DirectRunner": "it first tries to download Prism and run on that; FnApiRunner is the engine "
    "it falls back to",
    "SwitchingDirectRunner": "it first tries to download Prism and run on that",
    "PrismRunner": "it downloads a program, and no build was ever checked on it",
    "DaskRunner": "it was measured to drop elements silently",
}


def arguments(parser: Parser, given: list[str], runner: str, workers: int) -> list[str]:
    """Returns Beam's arguments: the runner, its workers, and what was `given` besides our flags.

    Beam drops what it cannot parse without a word, a misspelt flag included; here it is an error.

    Raises:
      UserError: a runner or mode that loses data or downloads a program.
      SystemExit: a flag that neither this command nor Beam knows.
    """
    name = runner.rsplit(".", 1)[-1]
    if name in _REFUSED:
        raise UserError(f"--runner={runner} is refused: {_REFUSED[name]}")
    if any("multi_threading" in argument for argument in given):
        raise UserError(
            "--direct_running_mode=multi_threading loses elements silently and reports success "
            "(wrong in 11 of 23 large runs measured); use --workers=N, which starts processes"
        )
    if given:
        _refuse_unknown(parser, given)
    if workers == 1:
        return [f"--runner={runner}", *given]
    if name != _IN_PROCESS:
        raise UserError(f"--workers is for {_IN_PROCESS}: {runner} has flags of its own for that")
    mode = ["--direct_running_mode=multi_processing", f"--direct_num_workers={workers}"]
    return [f"--runner={runner}", *mode, *given]


def import_beam() -> Any:
    """Returns the package apache_beam, imported without its warning that `gcp` is not installed."""
    logging.disable(logging.WARNING)
    try:
        import apache_beam
    finally:
        logging.disable(logging.NOTSET)
    return apache_beam


def _refuse_unknown(parser: Parser, given: list[str]) -> None:
    import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    beam: Any = Parser(prog=parser.prog, add_help=False, conflict_handler="resolve")
    for group in PipelineOptions.__subclasses__():
        group._add_argparse_args(beam)  # as PipelineOptions itself does
    unknown = beam.parse_known_args(given)[1]
    if unknown:
        flag = unknown[0].split("=")[0]
        hint = nearest(flag, [*parser._option_string_actions, *beam._option_string_actions])
        parser.exit(EXIT_USER_ERROR, f"{parser.prog}: error: unknown flag {flag}{hint}\n")
