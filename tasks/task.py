"""A task: a corpus, an objective and lengths, as frozen plain data."""

import dataclasses

from tasks.objectives import AutoregressiveLM, Lengths, Objective, PrefixLM, SpanCorruption


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """What a task's name stands for.

    `corpus` is the corpus that pipeline.build reads unless --corpus names another; `lengths` are
    the defaults of the trainer and, through the objective, of the cache's rows.
    """

    name: str
    corpus: str
    objective: Objective
    lengths: Lengths

    @property
    def window_tokens(self) -> int:
        """Corpus tokens of one example at the default lengths."""
        return self.objective.window_tokens(self.lengths)


def pretraining_tasks(family: str, corpus: str) -> tuple[TaskSpec, ...]:
    """The objectives every corpus family offers, named FAMILY_OBJECTIVE."""
    span = SpanCorruption()
    return (
        TaskSpec(f"{family}_span_corruption", corpus, span, Lengths(inputs=512, targets=114)),
        TaskSpec(f"{family}_prefix_lm", corpus, PrefixLM(), Lengths(inputs=512, targets=512)),
        TaskSpec(f"{family}_autoregressive_lm", corpus, AutoregressiveLM(), Lengths(0, 512)),
    )
