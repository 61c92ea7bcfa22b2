"""A prepared run: its configuration, checked against its data."""

import dataclasses

from tasks.objectives import Lengths
from trainer.config import Config
from trainer.data.features import Converter
from trainer.data.interface import Data


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked configuration and the data it refers to."""

    config: Config
    data: Data
    converter: Converter

    @property
    def lengths(self) -> Lengths:
        """Lengths of the features."""
        return self.data.lengths
