"""Matplotlib, imported only where a picture is drawn."""

from typing import Any

from tasks.terminal.command_line import UserError


def load_pyplot() -> Any:
    """Returns matplotlib's pyplot, set up to write files without a display.

    Raises:
      UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
