"""What one document of a corpus is: a text, or a pair of inputs and targets."""

import enum

SIDES = ("inputs", "targets")


class Unit(enum.Enum):
    """The unit of a corpus, of its cache, and of an objective that reads it."""

    TEXT = "text"
    PAIR = "pair"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a batch of documents that hold text."""
        return SIDES if self is Unit.PAIR else ("text",)

    @property
    def plural(self) -> str:
        """The word for several, in messages."""
        return f"{self.value}s"
