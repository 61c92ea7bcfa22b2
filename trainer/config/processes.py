"""How the processes of a run find one another, in plain data that needs no JAX."""

import dataclasses
import re

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """How the processes of a run find one another.

    `coordinator` None: this process is the only one. "auto": the TPU pod, SLURM, Open MPI or
    Kubernetes that started them knows, and the command is the same everywhere. HOST:PORT: an
    address of process 0 that all can reach; there are `count` of them and this is number `index`.

    A process that is not heard of for `timeout_seconds` ends all others.

    Raises:
        ValueError: at construction, naming the field, if a value makes no sense.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    timeout_seconds: int = 60

    def __post_init__(self) -> None:
        named = self.coordinator not in (None, AUTO)
        if named and not re.fullmatch(r".+:\d+", str(self.coordinator)):
            raise ValueError(
                f"ProcessesConfig.coordinator is {self.coordinator!r}; it must be HOST:PORT of "
                "process 0, or auto"
            )
        for name in ("count", "index"):
            if (getattr(self, name) is not None) != named:
                raise ValueError(
                    f"ProcessesConfig.{name} is {getattr(self, name)}; it goes with a coordinator "
                    f"HOST:PORT, and coordinator is {self.coordinator!r}"
                )
        if self.count is not None and self.index is not None and not 0 <= self.index < self.count:
            raise ValueError(
                f"ProcessesConfig.index is {self.index}; it must be from 0 to {self.count - 1}"
            )
        if self.timeout_seconds < 5:
            raise ValueError(
                f"ProcessesConfig.timeout_seconds is {self.timeout_seconds}; it must be 5 or more"
            )
