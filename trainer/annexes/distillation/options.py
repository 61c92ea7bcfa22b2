"""Settings of learning from another model's probabilities. No JAX."""

import dataclasses

from tasks.terminal.flag_fields import Checked, ReadIf, Rule, above, field
from trainer.config.data import OURS

_TAUGHT = ReadIf(lambda config: config.distillation.on, "without --teacher", whole=True)


@dataclasses.dataclass(frozen=True)
class DistillationConfig(Checked):
    """Learning from a teacher.

    Source: Hinton et al. 2015 (arXiv:1503.02531), section 2.
    """

    teacher: str | None = field(
        None,
        "model with the run's vocabulary whose probabilities the run's model learns: hf:DIR, or a "
        "run or checkpoint of this trainer; a decoder also teaches an encoder-decoder",
        aliases=("--teacher",),
        read_if=OURS,
    )
    weight: float = field(
        1.0,
        "weight of the divergence from the teacher, in (0, 1]; the other loss has the rest",
        rule=Rule("in (0, 1]", lambda value: 0 < value <= 1),
        read_if=_TAUGHT,
    )
    temperature: float = field(
        1.0,
        "divisor of both models' logits in the divergence, which is multiplied by its square; "
        "above 0",
        rule=above(0),
        read_if=_TAUGHT,
    )
    prefix: bool = field(
        False,
        "let a decoder-only teacher see the inputs in both directions, as a prefix LM does",
        read_if=_TAUGHT,
    )

    @property
    def on(self) -> bool:
        return self.teacher is not None
