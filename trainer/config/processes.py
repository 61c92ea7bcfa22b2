"""Settings by which the processes of a run find one another. Plain data, no JAX."""

import argparse
import dataclasses
import re

from tasks.terminal.dataclass_flags import add_flags, options_of
from tasks.terminal.fields import Rule, at_least, check, field, require

AUTO = "auto"

_COORDINATOR = Rule(
    "HOST:PORT of process 0, or auto",
    lambda value: value == AUTO or re.fullmatch(r".+:\d+", value) is not None,
)


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """Settings by which the processes of a run find one another.

    Raises:
      Rejected: at construction, if a value is invalid.
    """

    coordinator: str | None = field(
        None,
        "HOST:PORT of process 0, reachable from all processes; auto: ask the TPU pod, SLURM, Open "
        "MPI or Kubernetes that started them, so that the command is the same everywhere; None: "
        "a single process",
        rule=_COORDINATOR,
    )
    count: int | None = field(None, "number of processes, with a coordinator HOST:PORT")
    index: int | None = field(
        None, "index of this process, from 0, with a coordinator HOST:PORT", rule=at_least(0)
    )
    timeout_seconds: int = field(
        60,
        "seconds of silence after which a process counts as lost and all others end; 5 or more",
        rule=at_least(5),
    )

    def __post_init__(self) -> None:
        check(self)
        named = self.coordinator not in (None, AUTO)
        for name in ("count", "index"):
            value = getattr(self, name)
            rule = "set" if named else "unset"
            require(
                (value is not None) == named,
                f"ProcessesConfig.{name}",
                value,
                f"{rule} where coordinator is {self.coordinator!r}; it goes with a coordinator "
                "HOST:PORT",
            )
        if self.count is not None and self.index is not None:
            require(
                self.index < self.count,
                "ProcessesConfig.index",
                self.index,
                f"from 0 to {self.count - 1}",
            )


_PREFIX = "processes."


def add_processes_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a `ProcessesConfig` to a command that does not train."""
    group = parser.add_argument_group("several hosts", "start the same command on each of them")
    add_flags(group, ProcessesConfig, _PREFIX)


def processes_of(flags: argparse.Namespace) -> ProcessesConfig:
    """Returns the settings of the flags that `add_processes_flags` added.

    Raises:
      UserError: they do not fit together.
    """
    return options_of(flags, ProcessesConfig, _PREFIX)
