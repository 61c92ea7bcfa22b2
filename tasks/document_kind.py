"""The kind of a corpus's documents: texts, or pairs of inputs and targets."""

import enum

SIDES = ("inputs", "targets")


class DocumentKind(enum.Enum):
    """The unit of a corpus, of its cache, and of an objective."""

    TEXT = "text"
    PAIR = "pair"

    @property
    def columns(self) -> tuple[str, ...]:
        return SIDES if self is DocumentKind.PAIR else ("text",)

    @property
    def plural(self) -> str:
        return f"{self.value}s"
