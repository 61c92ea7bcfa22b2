"""Beam's own flags."""

import argparse
import logging
from collections.abc import Sequence
from typing import Any, NoReturn

from tasks.terminal.command_line import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def import_beam() -> Any:
    """Imports and returns apache_beam without its warning about missing `gcp`."""
    logging.disable(logging.WARNING)
    try:
        import apache_beam
    finally:
        logging.disable(logging.NOTSET)
    return apache_beam


def not_of(given: Sequence[str]) -> list[str]:
    """Returns the `given` words without Beam's flags."""
    import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    beam: Any = _Parser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for group in PipelineOptions.__subclasses__():
        group._add_argparse_args(beam)  # as in PipelineOptions
    return beam.parse_known_args(given)[1]
