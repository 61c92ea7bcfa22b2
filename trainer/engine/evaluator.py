"""Evaluates a whole split: sums over its rows, and metrics computed from the sums."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from trainer.data.features import Batch, target_side
from trainer.data.run import EvaluationSet, Run
from trainer.engine.metrics import Metrics, means, perplexity
from trainer.engine.sharding import put_batch
from trainer.engine.word_counts import WordCounter

# Metrics of the evaluation step that are not reported as means under their own names.
_OTHERWISE = {"loss", "z_loss", "accuracy"}

# All metrics of an `Evaluator`; metrics of text and of suites have different names.
TOKEN_METRICS = frozenset(
    {
        *("loss", "perplexity", "accuracy", "unigram_entropy", "bits_per_byte", "word_perplexity"),
        *("tokens", "training_loss", "mean_label", "max_targets_length", "sequence_accuracy"),
        *("order_loss", "order_accuracy", "auxiliary_loss", "dropped_tokens"),
    }
)

# Name of the row of unweighted means over a mixture's tasks.
MEAN = "mean"
_AVERAGED = ("loss", "accuracy", "unigram_entropy", "bits_per_byte")


def _mean(results: list[dict[str, float]]) -> dict[str, float]:
    found = {
        name: sum(result[name] for result in results) / len(results)
        for name in _AVERAGED
        if all(name in result for result in results)
    }
    return {**found, "perplexity": perplexity(found["loss"])}


class Evaluator:
    """Runs the evaluation step on a whole split, or on `evaluation.batches` batches per task."""

    def __init__(self, run: Run, split: str, evaluation_step: Callable, mesh: Mesh):
        self._split, self._step, self._mesh = split, evaluation_step, mesh
        self._vocab_size = run.data.vocab_size
        self._texts = _texts(run, split)
        batch_size = run.config.evaluation.batch_size or run.config.batch_size
        parts = mesh.shape["data"] * mesh.shape["fsdp"]
        if batch_size % parts:
            raise UserError(
                f"--evaluation.batch_size={batch_size} is not divisible by the {parts} devices "
                "of data and fsdp"
            )
        self._sets = run.data.evaluation(split, batch_size)
        self._batches = run.config.evaluation.batches

    def __call__(
        self, params: Any, stopping: Callable[[], bool] = lambda: False
    ) -> dict[str, dict[str, float]] | None:
        """Evaluates `params` on the same rows, with the same noise, at every call.

        `stopping` is checked after every batch; True abandons the evaluation, which then returns
        None.

        Returns metrics by split: all rows under SPLIT; for a mixture also each task's rows under
        SPLIT/TASK, and the tasks' unweighted means under SPLIT/mean.

        Always: `loss` and `unigram_entropy` (the loss of a model that knows only the frequencies of
        target ids) in nats per target token, `perplexity`, `accuracy` and `tokens`. `mean_label`
        and `max_targets_length` identify the data. `training_loss` is averaged over all positions,
        padding included, and includes the auxiliary loss.

        Encoder-only models: `order_loss` in nats per row and `order_accuracy`. Other models:
        `sequence_accuracy`, the fraction of rows whose targets are all ranked first. Models
        whose layers sow: `auxiliary_loss` and metrics of their own.

        Language models: `bits_per_byte`, the cost of coding the split's documents per UTF-8 byte,
        and `word_perplexity`, exp of that cost in nats per whitespace-separated word. The EOS after
        windows or documents is coded too, but has no bytes. A prefix LM's bytes are estimated as
        the split's bytes times the fraction predicted. Unknown tokens are coded as such.
        """
        by_task: dict[str, _Sums] = {}
        for rows in self._sets:
            sums = self._sums(params, rows, stopping)
            if sums is None:
                return None
            by_task[rows.name] = sums
        overall = _Sums(np.zeros(self._vocab_size, np.int64), text_bytes=0.0, word_count=0)
        for sums in by_task.values():
            overall.add(sums)
        results = {self._split: overall.result()}
        if len(by_task) > 1:
            of_tasks = {f"{self._split}/{name}": sums.result() for name, sums in by_task.items()}
            results |= {**of_tasks, f"{self._split}/{MEAN}": _mean(list(of_tasks.values()))}
        return results

    def _sums(self, params: Any, rows: EvaluationSet, stopping: Callable[[], bool]) -> _Sums | None:
        text = self._texts.get(rows.name)
        sums = _Sums(np.zeros(self._vocab_size, np.int64), words=text.words if text else None)
        # Metrics are read one batch late, so that the device always has work.
        pending: Metrics = {}
        total = min(filter(None, (rows.batches, self._batches)), default=None)
        with progress.shown(f"evaluating {self._split} of {rows.name}", total) as bar:
            for number, batch in enumerate(itertools.islice(rows.iterate(), self._batches)):
                sums.add_targets(batch)
                ready, pending = pending, self._step(params, put_batch(batch, self._mesh))
                sums.add_metrics(ready)
                bar.update(number + 1)
                if stopping():
                    return None
        sums.add_metrics(pending)
        if text:
            sums.text_bytes = text.bytes_of(sums)
        return sums


@dataclasses.dataclass(frozen=True)
class _Text:
    """The text behind a task's targets, for tasks whose targets are corpus tokens.

    `bytes_per_token` is the split's mean, in UTF-8 bytes; `eos` is True if each window's targets
    end with an EOS that is not in the corpus.
    """

    bytes_per_token: float
    eos: bool
    words: WordCounter

    def bytes_of(self, sums: _Sums) -> float:
        """Returns how many UTF-8 bytes of text the targets in `sums` code."""
        return (sums.tokens - self.eos * sums.rows) * self.bytes_per_token


def _texts(run: Run, split: str) -> dict[str, _Text]:
    texts: dict[str, _Text] = {}
    for cached in run.data.tasks:
        objective = cached.task.objective
        if not objective.codes_text:
            continue
        manifest = run.data.evaluated(cached, split)
        tokens = manifest.total(split, "tokens") if split in manifest.splits else 0
        if tokens:
            weight = manifest.total(split, "text_bytes") / tokens
            texts[cached.task.name] = _Text(weight, objective.appends_eos, WordCounter(cached.ids))
    return texts


def _sum_if_known(one: Any, other: Any) -> Any:
    return None if one is None or other is None else one + other


@dataclasses.dataclass
class _Sums:
    """Sums over rows of metrics and target tokens.

    `counts`, int64 [V], are frequencies of ids as targets; `rows` counts rows with targets, and
    `positions` their positions with padding; `text_bytes` and `word_count` describe the coded text
    (None: unknown); `longest` is the most targets in a row; `metrics` are (sum, weight) by name.
    """

    counts: np.ndarray
    tokens: float = 0.0
    rows: int = 0
    text_bytes: float | None = None
    words: WordCounter | None = None
    word_count: int | None = None
    positions: int = 0
    longest: int = 0
    metrics: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def add_targets(self, batch: Batch) -> None:
        side = target_side(batch)
        weights = batch[f"{side}_loss_weights"]
        targets = batch[f"{side}_target_tokens"][weights > 0]
        self.counts += np.bincount(targets, minlength=len(self.counts))
        self.tokens += float(weights.sum())
        lengths = np.count_nonzero(weights, axis=1)
        rows = int(np.count_nonzero(lengths))
        self.rows += rows
        self.positions += rows * weights.shape[1]
        self.longest = max(self.longest, int(lengths.max()))
        if self.words:
            words = self.words(batch[f"{side}_target_tokens"], weights > 0)
            self.word_count = (self.word_count or 0) + words

    def add_metrics(self, metrics: Metrics) -> None:
        """Adds a batch's metrics; waits for the device."""
        for name, (total, weight) in metrics.items():
            self._add(name, float(total), float(weight))

    def add(self, other: _Sums) -> None:
        self.counts += other.counts
        self.tokens += other.tokens
        self.rows += other.rows
        self.positions += other.positions
        self.longest = max(self.longest, other.longest)
        self.word_count = _sum_if_known(self.word_count, other.word_count)
        self.text_bytes = _sum_if_known(self.text_bytes, other.text_bytes)
        for name, (total, weight) in other.metrics.items():
            self._add(name, total, weight)

    def _add(self, name: str, total: float, weight: float) -> None:
        before = self.metrics.get(name, (0.0, 0.0))
        self.metrics[name] = before[0] + total, before[1] + weight

    def result(self) -> dict[str, float]:
        values, coded = means(self.metrics), {}
        loss, auxiliary = values["loss"], values.get("auxiliary_loss", 0.0)
        share = self.counts[self.counts > 0] / self.counts.sum()
        if self.text_bytes:
            coded["bits_per_byte"] = loss * self.tokens / math.log(2) / self.text_bytes
        if self.word_count:
            coded["word_perplexity"] = perplexity(loss * self.tokens / self.word_count)
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "accuracy": values["accuracy"],
            "unigram_entropy": float(-(share * np.log(share)).sum()),
            **coded,
            "tokens": self.tokens,
            "training_loss": (loss + auxiliary) * (self.tokens / self.positions),
            "mean_label": float(self.counts @ np.arange(len(self.counts)) / self.counts.sum()),
            "max_targets_length": self.longest,
            **{name: value for name, value in values.items() if name not in _OTHERWISE},
        }
