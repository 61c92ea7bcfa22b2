"""Settings with which a run's processes find one another. Plain data, no JAX."""

import dataclasses
import re

from tasks.terminal.flag_fields import ReadIf, Rule, at_least, check, field, require

AUTO = "auto"

_COORDINATOR = Rule(
    "HOST:PORT of process 0, or auto",
    lambda value: value == AUTO or re.fullmatch(r".+:\d+", value) is not None,
)


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """Settings with which a run's processes find one another."""

    coordinator: str | None = field(
        None,
        "HOST:PORT of process 0, reachable from all processes; auto: ask the TPU pod, SLURM, Open "
        "MPI or Kubernetes, so that all processes run the same command; None: a single process",
        rule=_COORDINATOR,
        often="HOST:PORT of process 0, or auto",
        aliases=("--coordinator_address",),  # this and the others are T5X's
    )
    count: int | None = field(
        None, "number of processes, if coordinator is HOST:PORT", aliases=("--process_count",)
    )
    index: int | None = field(
        None,
        "index of this process, from 0, if coordinator is HOST:PORT",
        rule=at_least(0),
        aliases=("--process_index",),
    )
    timeout_seconds: int = field(
        60,
        "seconds of silence after which a process counts as lost and all others end; 5 or more",
        rule=at_least(5),
        read_if=ReadIf(
            lambda config: config.coordinator is not None, "without --processes.coordinator"
        ),
    )

    def __post_init__(self) -> None:
        check(self)
        named = self.coordinator not in (None, AUTO)
        rule = (
            f"{'set' if named else 'unset'} if coordinator is {self.coordinator!r}; it goes "
            "with a coordinator HOST:PORT"
        )
        for name in ("count", "index"):
            value = getattr(self, name)
            require((value is not None) == named, f"ProcessesConfig.{name}", value, rule)
        if self.count is not None and self.index is not None:
            rule = f"from 0 to {self.count - 1}"
            require(self.index < self.count, "ProcessesConfig.index", self.index, rule)


# Title of the flag group in commands that do not train.
SEVERAL_HOSTS = "several hosts: start the same command on each of them"
