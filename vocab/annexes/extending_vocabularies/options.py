"""The flag of extended vocabularies."""

import dataclasses

from tasks.terminal.flag_fields import field


@dataclasses.dataclass(frozen=True)
class ExtendFlags:
    """Another vocabulary's pieces."""

    extend: str | None = field(
        None,
        "vocabulary to extend: it keeps its ids and scores and gains pieces from the corpus, up to "
        "--vocab_size; id_map.json maps old ids to new ids",
        metavar="DIR",
    )
