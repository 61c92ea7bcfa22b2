"""Settings of learning from another model's probabilities. No JAX."""

import dataclasses

from tasks.terminal.fields import Checked, ReadIf, Rule, above, field

_TAUGHT = ReadIf(lambda config: config.teacher is not None, "without --teacher", whole=True)


@dataclasses.dataclass(frozen=True)
class DistillationConfig(Checked):
    """The loss of a run with a teacher.

    Source: Hinton et al. 2015 (arXiv:1503.02531), section 2.
    """

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
