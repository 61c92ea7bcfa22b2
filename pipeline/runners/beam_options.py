"""Beam's own flags: rejects unsafe runners and unknown flags."""

import argparse
import logging
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from tasks.terminal import habits
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import names_of

IN_PROCESS = "FnApiRunner"
_REJECTED = {
    "DirectRunner": "it first tries to download and use Prism; use FnApiRunner, to which it falls "
    "back",
    "SwitchingDirectRunner": "it first tries to download and use Prism",
    "PrismRunner": "it downloads a program, and builds were never tested with it",
    "DaskRunner": "it silently dropped elements in tests",
}
DATAFLOW = "DataflowRunner"
PORTABLE = ("PortableRunner", "FlinkRunner", "SparkRunner")
# Flags sometimes given to the wrong command.
OF_PRETRAIN = (
    *("batch_size", "gin_file", "init_from", "lengths.inputs", "lengths.targets", "microbatches"),
    *("model_dir", "optimizer.learning_rate", "optimizer_preset", "preset", "seed"),
    *("tokens_per_batch", "train_steps"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def arguments(flags: Any) -> list[str]:
    """Returns Beam's arguments; refuses unknown flags and runners that lose data or download."""
    given, runner, workers = flags.runner_flags, flags.runner or IN_PROCESS, flags.workers
    name = runner_name(runner)
    runner = runner if "." in runner else name
    if name in _REJECTED:
        raise UserError(f"--runner={flags.runner} is refused: {_REJECTED[name]}")
    if name not in (IN_PROCESS, DATAFLOW, *PORTABLE) and "." not in runner:
        others = "; on Slurm, give each task of an array --part=K/N" if name == "slurm" else ""
        raise UserError(
            f"unknown --runner={flags.runner}: it is spark, ray, {DATAFLOW}, "
            f"{', '.join(PORTABLE)} or the dotted name of a class of Beam{others} (docs/engines.md)"
        )
    if any("multi_threading" in argument for argument in given):
        raise UserError(
            "--direct_running_mode=multi_threading loses elements silently and reports success "
            "(in 11 of 23 large test runs); use --workers=N, which starts processes"
        )
    refuse_unknown(given, names_of(flags))
    if name == IN_PROCESS:
        if given:
            raise UserError(
                f"{given[0]} has no effect without a --runner such as DataflowRunner; --workers=N "
                "starts N processes on this machine"
            )
    elif workers != 1:
        raise UserError(f"--workers is for {IN_PROCESS} only: use the flags of {runner} instead")
    return [f"--runner={runner}", *given]


def runner_name(runner: str) -> str:
    """Returns the class of a --runner, which Beam reads in any case and without "Runner", too."""
    name = runner.rsplit(".", 1)[-1]
    classes = (*_REJECTED, IN_PROCESS, DATAFLOW, *PORTABLE)
    spellings = name.lower(), f"{name.lower()}runner"
    return next((each for each in classes if each.lower() in spellings), name)


def import_beam() -> Any:
    """Imports and returns apache_beam without its warning about missing `gcp`."""
    logging.disable(logging.WARNING)
    try:
        import apache_beam
    finally:
        logging.disable(logging.NOTSET)
    return apache_beam


def refuse_unknown(given: Sequence[str], known: Collection[str]) -> None:
    """Raises a UserError for the first of `given` flags unknown to Beam and to us (`known`)."""
    if not given:
        return
    unknown = _unread(given)
    if unknown:
        flag = unknown[0].split("=")[0]
        hint = habits.hint(flag, known)
        if flag.removeprefix("--") in OF_PRETRAIN:
            hint = " (it is a flag of trainer.pretrain)"
        raise UserError(f"unknown flag {flag}{hint}")


def _unread(given: Sequence[str]) -> list[str]:
    """Returns those of the `given` words that are no flags of Beam's."""
    import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    beam: Any = _Parser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for group in PipelineOptions.__subclasses__():
        group._add_argparse_args(beam)  # as in PipelineOptions
    return beam.parse_known_args(given)[1]
