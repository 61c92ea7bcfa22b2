"""Several processes that make one run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """x"""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    timeout_seconds: int = 60
