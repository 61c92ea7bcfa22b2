"""A task: a corpus, an objective and lengths, as frozen plain data."""

import dataclasses

from tasks.objectives import (
    DENOISING,
    AutoregressiveLM,
    DecoderPrefixLM,
    Lengths,
    Objective,
    prefix_lm,
    span_corruption,
)
from tasks.objectives.masked_lm import MaskedLM
from tasks.objectives.ul2 import MixtureOfDenoisers
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds

_INPUTS = 512


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

    def check(self, lengths: Lengths, ids: TokenIds, separator: str, where: str) -> None:
        """Holds lengths, a vocabulary and a cache's separator against what the objective needs.

        Args:
          lengths: of the features.
          ids: the vocabulary.
          separator: what ends a document in the cache.
          where: what error messages call the vocabulary.

        Raises:
          UserError: they cannot make the task's examples; says what could.
        """
        needed = self.objective.sentinels(lengths)
        if needed > ids.sentinels:
            raise UserError(
                f"{self.name} takes up to {needed} sentinels at these lengths, and {where} has "
                f"{ids.sentinels}: make one with vocab.train --extra_ids={max(needed, 100)}, add "
                "them to a model that has none with --extra_ids, or use shorter inputs"
            )
        for piece in self.objective.pieces:
            ids.id_of(piece)
        if self.objective.separator not in (None, separator):
            raise UserError(
                f"{self.name} needs the cache's documents to end in {self.objective.separator}, "
                f"and here the separator is {separator}: build with "
                f"--separator={self.objective.separator}"
            )


def pretraining_tasks(family: str, corpus: str) -> tuple[TaskSpec, ...]:
    """The objectives every corpus family offers, named FAMILY_OBJECTIVE.

    UL2 has inputs of 384: its densest denoiser then has 96 spans, and three of a hundred sentinels
    are left for modes.
    """
    objectives: dict[str, tuple[Objective, Lengths]] = {
        "span_corruption": (span_corruption(), Lengths(_INPUTS, 114)),
        "prefix_lm": (prefix_lm(), Lengths(_INPUTS, _INPUTS)),
        "decoder_prefix_lm": (DecoderPrefixLM(), Lengths(0, _INPUTS)),
        "autoregressive_lm": (AutoregressiveLM(), Lengths(0, _INPUTS)),
        "full_lm": (AutoregressiveLM(eos="document"), Lengths(0, _INPUTS)),
        "ul2": (MixtureOfDenoisers(), Lengths(384, 384)),
        "masked_lm": (MaskedLM(), Lengths(_INPUTS, _INPUTS)),
    }
    return tuple(
        TaskSpec(f"{family}_{name}", corpus, objective, lengths)
        for name, (objective, lengths) in objectives.items()
    )


def language_modeling_task(family: str, corpus: str) -> TaskSpec:
    """Primer's task, under its name: T5's `lm`, an EOS at the end of every row of 512.

    Source: google-research/primer, `t5_tasks.py` and `objectives/lm.gin`.
    Differences: of a document longer than 65,536 tokens upstream reads one part of as many an
    epoch; here it is read whole.
    """
    name = f"{family}_autoregressive_language_modeling"
    return TaskSpec(name, corpus, AutoregressiveLM(), Lengths(0, _INPUTS))


def denoising_tasks(family: str, corpus: str) -> tuple[TaskSpec, ...]:
    """The objectives that the T5 paper compares, named FAMILY_EXPERIMENT."""
    return tuple(
        TaskSpec(f"{family}_{name}", corpus, objective, objective.fitting(_INPUTS))
        for name, objective in DENOISING.items()
    )
