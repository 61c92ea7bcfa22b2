"""Flags of dry runs."""

import dataclasses

from tasks.terminal.flag_fields import ReadIf, at_least, field


@dataclasses.dataclass(frozen=True)
class DryRunFlags:
    """Dry runs."""

    dry_run: bool = field(False, "estimate the size, time and cost of the build, and write nothing")
    json: bool = field(
        False,
        "with --dry_run, print the estimate as JSON, a line for each language",
        read_if=ReadIf(lambda options: options.dry_run, "without --dry_run"),
    )
    price_per_vcpu_hour: float | None = field(
        None,
        "dollars per vCPU and hour, including memory and disk, for --dry_run and the plan "
        "of a recipe; the list price if not set",
        rule=at_least(0),
    )
