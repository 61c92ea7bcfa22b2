"""Settings of the evaluation in motif.py."""

from dataclasses import dataclass

from tasks.terminal.flag_fields import Checked, field


@dataclass(frozen=True)
class MotifConfig(Checked):
    """A sequence that each evaluation asks the model to reverse."""

    sequence: str | None = field(None, "sequence, such as 'ACG TTA'", changes="nothing")

    @property
    def on(self) -> bool:
        return self.sequence is not None
