"""Settings of parameters that were trained with another vocabulary. No JAX."""

import dataclasses

from tasks.terminal.flag_fields import ReadIf, at_least, check, field, require

_STARTS = ReadIf(lambda config: config.init_from is not None, "without --init_from", whole=True)


@dataclasses.dataclass(frozen=True)
class OldVocabularyConfig:
    """The vocabulary with which the parameters of `init_from` were trained."""

    path: str | None = field(
        None,
        "old vocabulary, needed if --init_from has none; rows are matched by piece "
        "(docs/vocabulary.md); None: init_from's own",
        read_if=_STARTS,
    )
    extra_ids: int | None = field(
        None,
        "number of sentinels to add to the pieces of path, 100 for T5's model; None: 0",
        rule=at_least(0),
        read_if=ReadIf(lambda config: config.path is not None, "without init_from_vocabulary.path"),
    )
    id_map: str | None = field(
        None,
        "id_map.json of an extended or cut vocabulary, which maps old rows to new ones, or "
        "its folder; None: match rows by piece",
        read_if=_STARTS,
    )

    def __post_init__(self) -> None:
        check(self)
        rule = "left out if init_from_vocabulary.path is set: either says which rows to carry over"
        alone = self.id_map is None or self.path is None
        require(alone, "OldVocabularyConfig.id_map", self.id_map, rule)
