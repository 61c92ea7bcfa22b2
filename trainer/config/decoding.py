"""Settings for decoding. Plain data, no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.terminal.flag_fields import (
    REQUIRED,
    SEED,
    ReadIf,
    Rule,
    above,
    at_least,
    check,
    field,
    require,
)
from tasks.vocabulary import EOS_ID
from trainer.config import averages

GREEDY, BEAM, SAMPLE = "greedy", "beam", "sample"
METHODS = (GREEDY, BEAM, SAMPLE)
# Variants of beam search, named after the projects that they reproduce, and their default alphas.
T5X, TRANSFORMERS = "t5x", "transformers"
_ALPHAS: Mapping[str, float] = {T5X: 0.6, TRANSFORMERS: 1.0}
EARLY_STOPPING = ("false", "true", "never")
# What a model that reads inputs is asked for after a context: all of its targets, or a span.
TARGETS, SPAN = FORMS = ("targets", "span")

_SHARE = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
_FINITE = Rule("finite", math.isfinite)


@dataclass(frozen=True, kw_only=True)
class TrainedFlags:
    """Flags that name a run's checkpoint and vocabulary."""

    model_dir: str = field(REQUIRED, "folder of the run, local or remote")
    step: int | None = field(None, "step of the checkpoint; None: the newest", aliases=("steps",))
    average: str | None = field(None, **averages.OF_COMMANDS)
    vocabulary: str | None = field(None, "folder or file of the vocabulary; None: the cache's")
    cache_dir: str | None = field(None, "folder of the tasks' caches, if they have moved")
    task_module: str | None = field(None, "Python module that registers a vocabulary class")


def _with_method(method: str) -> ReadIf:
    return ReadIf(
        lambda config: config.method == method,
        lambda config: f"with method {config.method!r}: it is for {method!r}",
    )


_BEAM, _SAMPLE = _with_method(BEAM), _with_method(SAMPLE)
_TRANSFORMERS_LAW = ReadIf(
    lambda config: config.method == BEAM and config.length_penalty == TRANSFORMERS,
    f"without length_penalty {TRANSFORMERS!r}",
)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings for choosing the tokens after a prompt; those without effect are rejected."""

    method: str = field(
        GREEDY,
        "how to choose tokens: the most likely next token (greedy), the most likely of several "
        "sequences extended together (beam), or a token drawn by probability (sample)",
        choices=METHODS,
    )
    max_new_tokens: int = field(
        128, "maximum number of tokens after a prompt, including the end of the text", rule=above(0)
    )
    num_beams: int | None = field(
        None,
        "number of sequences that beam search extends together; None: 4",
        rule=above(1),
        read_if=_BEAM,
    )
    length_penalty: str | None = field(
        None,
        "how beam search compares sequences of different lengths, and when it stops: it divides "
        "log probabilities by ((5 + length) / 6) ** alpha (t5x) or length ** alpha (transformers); "
        "None: t5x",
        choices=tuple(_ALPHAS),
        read_if=_BEAM,
    )
    alpha: float | None = field(
        None,
        "exponent of the length penalty; None: 0.6 for t5x, 1 for transformers",
        rule=_FINITE,
        read_if=_BEAM,
    )
    early_stopping: str | None = field(
        None,
        "when beam search with transformers' length penalty stops: once the best unfinished "
        "sequence scores below all finished ones at its present length (false) or at any length "
        "(never), or once num_beams are finished (true); None: false",
        choices=EARLY_STOPPING,
        read_if=_TRANSFORMERS_LAW,
    )
    temperature: float | None = field(
        None, "divisor of the logits before sampling; None: 1", rule=above(0), read_if=_SAMPLE
    )
    top_k: int | None = field(
        None, "sample from this many most likely tokens; None: all", rule=above(0), read_if=_SAMPLE
    )
    top_p: float | None = field(
        None,
        "sample from the fewest likely tokens whose probabilities sum to at least this; None: all",
        rule=_SHARE,
        read_if=_SAMPLE,
    )
    num_return_sequences: int = field(
        1, "number of results per prompt: samples, or best beams", rule=above(0)
    )
    seed: int = field(0, "seed for sampling; each prompt has its own key", rule=SEED)
    batch_size: int = field(32, "number of prompts to decode together", rule=above(0))
    eos_id: int = field(
        EOS_ID, "id of the token that ends a text; 1 means the vocabulary's EOS", rule=at_least(0)
    )
    prefix: bool = field(
        False,
        "in decoder-only models, let the prompt's tokens attend in both directions, as a task's "
        "inputs do in training",
    )
    cache: str = field(
        "auto",
        "keep keys and values of earlier tokens if the model can (auto), or recompute the whole "
        "row for each token (none)",
        choices=("auto", "none"),
    )

    def __post_init__(self) -> None:
        check(self)
        most = {GREEDY: 1, BEAM: self.beams, SAMPLE: math.inf}[self.method]
        number = self.num_return_sequences
        rule = f"at most {most} with method {self.method!r}"
        require(number <= most, "num_return_sequences", number, rule)

    @property
    def beams(self) -> int:
        """Number of sequences extended together."""
        return (self.num_beams or 4) if self.method == BEAM else 1

    @property
    def law(self) -> tuple[str, float]:
        """Name of the length penalty, and its exponent."""
        name = self.length_penalty or T5X
        return name, _ALPHAS[name] if self.alpha is None else self.alpha

    @property
    def rows(self) -> int:
        """Batch rows per prompt."""
        return self.num_return_sequences if self.method == SAMPLE else self.beams
