"""The flag of filters."""

import dataclasses

from tasks.terminal.flag_fields import field


@dataclasses.dataclass(frozen=True)
class FilterFlags:
    """Filters."""

    filter: tuple[str, ...] = field(
        (),
        "sets of rules that every document must pass, such as gopher,c4; one set with settings, "
        "such as 'gopher?min_words=30'; or a TOML file; may be repeated",
        repeated=True,
    )
