"""Tasks: a corpus, an objective and lengths, as frozen plain data."""

import dataclasses
import re

from tasks.objectives import (
    DENOISING,
    AutoregressiveLM,
    DecoderPrefixLM,
    Lengths,
    Objective,
    Supervised,
    prefix_lm,
    span_corruption,
)
from tasks.objectives.masked_lm import MaskedLM
from tasks.objectives.ul2 import MixtureOfDenoisers
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds

__all__ = ["TaskSpec", "denoising_tasks", "language_modeling_task", "pretraining_tasks"]

_INPUTS = 512


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A task.

    Attributes:
      name: name for flags.
      corpus: default corpus SPEC of pipeline.build; "" if --corpus must be given.
      objective: makes examples from windows of the corpus.
      lengths: default lengths of the examples, which set the default length of a cache's rows.

    Raises UserError at construction if the objective is not an `Objective`.
    """

    name: str
    corpus: str
    objective: Objective
    lengths: Lengths

    def __post_init__(self) -> None:
        if not isinstance(self.objective, Objective):
            raise UserError(
                f"the objective of task {self.name} is a {type(self.objective).__name__}, which "
                "must be a subclass of tasks.objectives.Objective"
            )

    @property
    def window_tokens(self) -> int:
        return self.objective.window_tokens(self.lengths)

    def check(self, lengths: Lengths, ids: TokenIds, separator: str, where: str) -> None:
        """Raises UserError unless lengths, vocabulary and a cache's separator serve the objective.

        `separator` ends documents in the cache, "none" or "eos"; messages call the vocabulary
        `where`.
        """
        needed = self.objective.sentinels(lengths)
        if needed > ids.sentinels:
            raise UserError(
                f"{self.name} needs up to {needed} sentinels at these lengths, but {where} has "
                f"{ids.sentinels}: make one with vocab.train --extra_ids={max(needed, 100)}, use "
                "--extra_ids to add sentinels to a model without any, or use shorter inputs"
            )
        for piece in self.objective.pieces:
            ids.id_of(piece)
        if self.objective.separator not in (None, separator):
            raise UserError(
                f"{self.name} needs a cache with separator {self.objective.separator} after "
                f"documents, but this cache has {separator}: build one with "
                f"--separator={self.objective.separator}"
            )


# Objectives of every corpus family, with lengths. UL2 has inputs of 384: its densest denoiser then
# has 96 spans, which leaves three of a hundred sentinels for modes.
_PRETRAINING: dict[str, tuple[Objective, Lengths]] = {
    "span_corruption": (span_corruption(), Lengths(_INPUTS, 114)),
    "prefix_lm": (prefix_lm(), Lengths(_INPUTS, _INPUTS)),
    "decoder_prefix_lm": (DecoderPrefixLM(), Lengths(0, _INPUTS)),
    "autoregressive_lm": (AutoregressiveLM(), Lengths(0, _INPUTS)),
    "full_lm": (AutoregressiveLM(eos="document"), Lengths(0, _INPUTS)),
    "ul2": (MixtureOfDenoisers(), Lengths(384, 384)),
    "masked_lm": (MaskedLM(), Lengths(_INPUTS, _INPUTS)),
}
_SENTENCE_ORDER = MaskedLM(split="sentences", short_share=0.1)
_NEXT_SENTENCE = MaskedLM(split="sentences", short_share=0.1, pairs="next")
# Objectives for a user's own corpus, keyed by the end of the task's name.
OBJECTIVES: dict[str, tuple[Objective, Lengths]] = {
    **_PRETRAINING,
    "lm": _PRETRAINING["autoregressive_lm"],
    "supervised": (Supervised(), Lengths(_INPUTS, _INPUTS)),
    # Megatron-LM's samples for BERT, as t5-experiments reads them, and BERT's own second task.
    "sentence_order": (_SENTENCE_ORDER, Lengths(_INPUTS, _INPUTS)),
    "next_sentence": (_NEXT_SENTENCE, Lengths(_INPUTS, _INPUTS)),
    **{name: (objective, objective.fitting(_INPUTS)) for name, objective in DENOISING.items()},
}


def own_task(name: str) -> TaskSpec | None:
    """Returns the task NAME_OBJECTIVE on a user's corpus; None if `name` is not of this form.

    pipeline.build takes its corpus from --corpus. OBJECTIVE alone is also a task, for a cache given
    by its own folder.
    """
    objective = objective_of(name)
    if objective is None:
        return None
    return TaskSpec(name, "", *OBJECTIVES[objective])


def objective_of(name: str) -> str | None:
    """Returns the longest objective name that `name` ends with, or None."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        return None
    found = [each for each in OBJECTIVES if name == each or name.endswith(f"_{each}")]
    return max(found, key=len, default=None)


def pretraining_tasks(family: str, corpus: str) -> tuple[TaskSpec, ...]:
    """Returns the tasks of every corpus family, named FAMILY_OBJECTIVE."""
    return tuple(TaskSpec(f"{family}_{name}", corpus, *made) for name, made in _PRETRAINING.items())


def language_modeling_task(family: str, corpus: str) -> TaskSpec:
    """Returns Primer's task, under its name: T5's `lm`, with an EOS at the end of every row of 512.

    Source: google-research/primer, `t5_tasks.py` and `objectives/lm.gin`.
    Differences: upstream reads one part of 65,536 tokens of a longer document in each epoch; here
    documents are read whole.
    """
    name = f"{family}_autoregressive_language_modeling"
    return TaskSpec(name, corpus, AutoregressiveLM(), Lengths(0, _INPUTS))


def denoising_tasks(family: str, corpus: str) -> tuple[TaskSpec, ...]:
    """Returns tasks with the objectives of the T5 paper, named FAMILY_EXPERIMENT."""
    return tuple(TaskSpec(f"{family}_{name}", corpus, *OBJECTIVES[name]) for name in DENOISING)
