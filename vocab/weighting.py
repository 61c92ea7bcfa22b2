"""Several corpora for one vocabulary, and their weights.

A corpus's share of the training text is proportional to its weight, or to its size to the power of
alpha. Its words count as if its text were repeated by a factor: 1 for the least repeated corpus.
"""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tasks import registry
from tasks.document_kind import DocumentKind
from tasks.reading import languages, sources
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, SHARE, field
from tasks.terminal.programs import program
from tasks.terminal.table import table

# Objectives that any text suits.
_OBJECTIVES = ("span_corruption", "lm", "ul2", "prefix_lm", "masked_lm")


@dataclasses.dataclass(frozen=True)
class Corpora:
    """Corpora by name, "" for a single one; shares are `weights`, or sizes to the power `alpha`."""

    parts: Mapping[str, sources.Corpus]
    weights: Mapping[str, float] | None = None
    alpha: float = 1.0

    @property
    def record(self) -> dict[str, Any]:
        if list(self.parts) == [""]:
            return self.parts[""].record
        weights = None if self.weights is None else dict(self.weights)
        records = {name: corpus.record for name, corpus in self.parts.items()}
        return {"corpora": records, "weights": weights, "alpha": self.alpha}

    def factors(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns the factor for each corpus's text, given its bytes; the smallest factor is 1."""
        if list(sizes) == [""]:
            return {"": 1.0}  # a single corpus without text is reported with reasons elsewhere
        for name, size in sizes.items():
            if not size:
                raise UserError(f"{name} has no text in train: leave it out")
        if self.weights is None and self.alpha == 1:
            return dict.fromkeys(sizes, 1.0)
        weights = self.weights or {name: float(size) ** self.alpha for name, size in sizes.items()}
        repeated = {name: weights[name] / size for name, size in sizes.items()}
        least = min(repeated.values())
        if not least or sum(weights.values()) / least >= 2**63:
            raise UserError(
                "--weights are too far apart: words of the corpus that counts most would count "
                "more than 2^63 times"
            )
        return {name: times / least for name, times in repeated.items()}


def as_corpora(corpus: "sources.Corpus | Corpora") -> Corpora:
    return corpus if isinstance(corpus, Corpora) else Corpora({"": corpus})


def shares(sizes: Mapping[str, int], factors: Mapping[str, float]) -> str:
    """Returns a table of the corpora: their bytes, and their shares before and after weighting."""
    weighted = {name: size * factors[name] for name, size in sizes.items()}
    every, after = sum(sizes.values()), sum(weighted.values())
    rows = []
    for name, size in sizes.items():
        before_and_after = f"{size / every:.2%}", f"{weighted[name] / after:.2%}"
        rows.append((name, f"{size:,}", *before_and_after, f"{factors[name]:,.3f}"))
    return table(("corpus", "bytes", "of all bytes", "of the training text", "times"), rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusFlags:
    """Flags that name corpora."""

    corpus: tuple[str, ...] = field(
        REQUIRED,
        f"corpus to read: {sources.forms()}; may be repeated, also as NAME=SPEC, or contain "
        "{language}",
        metavar="SPEC",
        repeated=True,
    )
    languages: str | None = field(
        None, "languages that replace {language} in --corpus", metavar="A,B"
    )
    task_module: str | None = field(
        None, "Python module that registers corpus formats and vocabularies", metavar="MODULE"
    )

    def specs(self) -> dict[str, sources.CorpusSpec]:
        """Loads the module and returns the corpora by name, in the order given."""
        if self.task_module:
            registry.load(self.task_module)
        return languages.specs(self.corpus, self.languages, unnamed=True)


def resolved(specs: Mapping[str, sources.CorpusSpec]) -> dict[str, sources.Corpus]:
    """Resolves corpora and prints notes."""
    languages.check(specs)
    parts = {name: sources.resolve(spec) for name, spec in specs.items()}
    for note in (note for corpus in parts.values() for note in corpus.notes):
        print(note)
    return parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorporaFlags(CorpusFlags):
    """Flags that name the corpora of a vocabulary and their weights."""

    weights: str | None = field(
        None,
        "weights of the corpora, in order or as NAME=W: each one's share of the training text",
        metavar="W,W",
    )
    alpha: float | None = field(
        None,
        "exponent: each corpus's share is proportional to its bytes ** alpha, from 0 (equal "
        "shares) to 1, the default; mT5 uses 0.3",
        rule=SHARE,
    )


def corpora_of(flags: CorporaFlags) -> Corpora:
    """Resolves the corpora that flags name, and prints notes."""
    specs = flags.specs()
    names = list(specs)
    given = [flag for flag in ("weights", "alpha") if getattr(flags, flag) is not None]
    if given and len(names) == 1:
        raise UserError(f"--{given[0]} has no effect, because there is only one corpus")
    if len(given) > 1:
        raise UserError("--weights and --alpha are alternatives: set only one")
    alpha = 1.0 if flags.alpha is None else flags.alpha
    weights = None if flags.weights is None else _weights(flags.weights, names)
    return Corpora(resolved(specs), weights, alpha)


def _weights(text: str, names: Sequence[str]) -> dict[str, float]:
    parts = [part.strip() for part in text.split(",")]
    values = [part.rpartition("=") for part in parts]
    keys = [key for key, equals, _ in values if equals]
    if keys and sorted(keys) != sorted(names):
        raise UserError(f"--weights={text} must name each corpus once: {', '.join(names)}")
    if len(values) != len(names):
        raise UserError(
            f"--weights={text} has {len(values)} weights, but there are {len(names)} corpora: "
            f"{', '.join(names)}"
        )
    found = {}
    for name, (key, _, value) in zip(names, values, strict=True):
        try:
            found[key or name] = float(value)
        except ValueError:
            raise UserError(f"--weights={text}: {value} is not a number") from None
    for name, weight in found.items():
        if not 0 < weight < float("inf"):
            raise UserError(f"--weights={text}: the weight of {name} must be above 0")
    return {name: found[name] for name in names}


def next_build(
    flags: CorporaFlags, corpora: Corpora, output: str, task: str = "span_corruption"
) -> str:
    """Returns lines that name the command to run after the vocabulary `output` is made."""
    of_pairs = any(corpus.spec.unit is DocumentKind.PAIR for corpus in corpora.parts.values())
    task = "supervised" if of_pairs else task
    command = [f"--task={task}", "--name=mine"]
    command += _corpus_flags(flags.corpus, corpora)
    command += [f"--languages={flags.languages}"] if flags.languages else []
    command += [f"--task_module={flags.task_module}"] if flags.task_module else []
    command += [f"--vocabulary={output}", "--cache_dir=cache"]
    *others, last = (each for each in _OBJECTIVES if each != task)
    other = f"\n      (--task={', '.join(others)} or {last} for another objective)"
    return f"next: {program('pipeline.build')} {shlex.join(command)}{'' if of_pairs else other}"


def _corpus_flags(texts: Sequence[str], corpora: Corpora) -> list[str]:
    """Returns pipeline.build's flags for corpora, which need names if there are several."""
    unnamed = len(texts) > 1 and list(corpora.parts) == list(texts)
    names = [f"part{number}=" if unnamed else "" for number in range(1, len(texts) + 1)]
    return [f"--corpus={name}{text}" for name, text in zip(names, texts, strict=True)]
