"""Evaluation on a whole split, and its command.

python -m trainer.evaluate --model_dir=DIR [--checkpoints=all|latest|STEPS]
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.inspection.word_counts import WordCounter
from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import Parser, UserError

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data.cached import EvaluationSet
    from trainer.setup import Run

EVALUATION_FILE = "evaluation.json"
# Metrics of the evaluation step that need no more than their mean.
_AS_THEY_ARE = ("order_", "sequence_accuracy", "auxiliary_loss", "dropped_tokens")


class Evaluator:
    """Runs the evaluation step over every row of a split, or so many batches of each of its tasks.

    Raises:
      UserError: the split is empty.
    """

    def __init__(self, run: "Run", split: str, evaluation_step: Callable, mesh: Any):
        self._split, self._step, self._mesh = split, evaluation_step, mesh
        self._vocab_size = run.data.vocab_size
        self._texts = _texts(run, split)
        batch_size = run.config.evaluation.batch_size or run.config.batch_size
        parts = mesh.shape["data"] * mesh.shape["fsdp"]
        if batch_size % parts:
            raise UserError(
                f"the evaluation's batch_size {batch_size} does not divide among the {parts} "
                "devices of data and fsdp"
            )
        self._sets = run.data.evaluation(split, batch_size)
        self._batches = run.config.evaluation.batches

    def __call__(self, params: Any) -> dict[str, dict[str, float]]:
        """Returns, by split, loss and unigram_entropy in nats a target token, perplexity, accuracy,
        tokens: of all rows under the split's name and, of a mixture, of each task under SPLIT/TASK.
        Of an encoder alone, also order_loss in nats a row, and order_accuracy; of others
        sequence_accuracy, the share of rows whose targets are all ranked first. `mean_label` and
        `max_targets_length` are of the targets' ids and say which data these are. `training_loss`
        is taken over all positions, padding among them, and has the auxiliary loss of experts,
        `auxiliary_loss`, with it; they drop `dropped_tokens` of their tokens.

        Of language models also `bits_per_byte`: what coding the split's documents takes, by a byte
        of their UTF-8. The EOS after windows or documents is coded too, but has no bytes. Of a
        prefix LM, which codes the rest of each window alone, the bytes of what it codes are taken
        to be its share of the split's tokens. Unknown tokens (`<unk>`) are coded as such: compare
        vocabularies that have them by their unknown rate too. Other objectives code no text.
        `word_perplexity` is the same cost by a word, what white space separates: exp of nats.
        Neither depends on how a vocabulary cuts the text.

        `unigram_entropy` is what a model would pay that knew only how often each target id occurs
        in this split: the line to be beaten. The same rows and noise are used every time.
        """
        each = {one.name: self._sums(params, one) for one in self._sets}
        everything = _Sums(np.zeros(self._vocab_size, np.int64), text_bytes=0.0, word_count=0)
        for sums in each.values():
            everything.add(sums)
        results = {self._split: everything.result()}
        if len(each) > 1:
            results |= {f"{self._split}/{name}": sums.result() for name, sums in each.items()}
        return results

    def _sums(self, params: Any, rows: "EvaluationSet") -> "_Sums":
        from trainer.engine.step import put_batch

        text = self._texts.get(rows.name)
        sums = _Sums(np.zeros(self._vocab_size, np.int64), words=text.words if text else None)
        pending = None
        total = min(filter(None, (rows.batches, self._batches)), default=None)
        with progress.shown(f"evaluating {self._split} of {rows.name}", total) as bar:
            for number, batch in enumerate(itertools.islice(rows.iterate(), self._batches)):
                sums.add_targets(batch)
                ready, pending = pending, self._step(params, put_batch(batch, self._mesh))
                sums.add_metrics(ready)
                bar.update(number + 1)
        sums.add_metrics(pending)
        if text:
            sums.text_bytes = text.bytes_behind(sums)
        return sums


@dataclasses.dataclass(frozen=True)
class _Text:
    """Of a task whose targets are tokens of the corpus: what they weigh in the split, whether
    every window's have an EOS more, and where words begin."""

    bytes_per_token: float
    eos: bool
    words: WordCounter

    def bytes_behind(self, sums: "_Sums") -> float:
        """UTF-8 bytes of the documents that the targets are tokens of."""
        return (sums.tokens - self.eos * sums.rows) * self.bytes_per_token


def _texts(run: "Run", split: str) -> dict[str, _Text]:
    """By task, for those of the run's whose targets are tokens of the corpus."""
    from tasks.objectives import AutoregressiveLM, DecoderPrefixLM, Denoising, RandomPrefix
    from trainer.data.cached import CachedData

    texts: dict[str, _Text] = {}
    for each in run.data.tasks if isinstance(run.data, CachedData) else ():
        objective, manifest = each.task.objective, each.manifest
        if isinstance(objective, AutoregressiveLM):
            eos = objective.eos == "window"
        elif isinstance(objective, DecoderPrefixLM):
            eos = False
        elif (
            isinstance(objective, Denoising)
            and isinstance(objective.mask, RandomPrefix)
            and objective.targets == "drop_noise_tokens"
        ):
            eos = True
        else:
            continue
        tokens = manifest.total(split, "tokens") if split in manifest.splits else 0
        if tokens:
            weight = manifest.total(split, "text_bytes") / tokens
            texts[each.task.name] = _Text(weight, eos, WordCounter(each.ids))
    return texts


@dataclasses.dataclass
class _Sums:
    """Sums over rows: of metrics, of target tokens, and how often each id is a target.

    `rows` are those with targets, `positions` all of theirs; `text_bytes` and `word_count` are what
    they are of the corpus, None if they are not.
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

    def add_targets(self, batch: dict[str, np.ndarray]) -> None:
        from trainer.data.features import target_side

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
            ids = np.where(weights > 0, batch[f"{side}_target_tokens"], 0)
            self.word_count = (self.word_count or 0) + self.words(ids)

    def add_metrics(self, metrics: Any) -> None:
        for name, (total, weight) in (metrics or {}).items():
            self._add(name, float(total), float(weight))

    def add(self, other: "_Sums") -> None:
        self.counts += other.counts
        self.tokens += other.tokens
        self.rows += other.rows
        self.positions += other.positions
        self.longest = max(self.longest, other.longest)
        if self.word_count is not None and other.word_count is not None:
            self.word_count += other.word_count
        else:
            self.word_count = None
        if self.text_bytes is not None and other.text_bytes is not None:
            self.text_bytes += other.text_bytes
        else:
            self.text_bytes = None
        for name, (total, weight) in other.metrics.items():
            self._add(name, total, weight)

    def _add(self, name: str, total: float, weight: float) -> None:
        before = self.metrics.get(name, (0.0, 0.0))
        self.metrics[name] = before[0] + total, before[1] + weight

    def result(self) -> dict[str, float]:
        from trainer.reporting.metrics import means, perplexity

        values = means(self.metrics)
        loss = values["loss"]
        share = self.counts[self.counts > 0] / self.counts.sum()
        per_position = self.tokens / self.positions
        auxiliary = values.get("auxiliary_loss", 0.0)
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "accuracy": values["accuracy"],
            "unigram_entropy": float(-(share * np.log(share)).sum()),
            **({"bits_per_byte": self._bits(loss) / self.text_bytes} if self.text_bytes else {}),
            **(
                {"word_perplexity": perplexity(loss * self.tokens / self.word_count)}
                if self.word_count
                else {}
            ),
            "tokens": self.tokens,
            "training_loss": (loss + auxiliary) * per_position,
            "mean_label": float(self.counts @ np.arange(len(self.counts)) / self.counts.sum()),
            "max_targets_length": self.longest,
            **{name: value for name, value in values.items() if name.startswith(_AS_THEY_ARE)},
        }

    def _bits(self, loss: float) -> float:
        return loss * self.tokens / math.log(2)


def chosen_steps(text: str, steps: list[int], model_dir: str) -> list[int]:
    """Those of a run's checkpoints that "all", "latest" or "1000,2000" names.

    Raises:
      UserError: there is none, or not that one.
    """
    if not steps:
        raise UserError(f"{model_dir} has no checkpoint yet: train with trainer.pretrain")
    if text == "all":
        return steps
    if text == "latest":
        return steps[-1:]
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--checkpoints={text}: give all, latest, or steps as 1000,2000") from error
    missing = [step for step in wanted if step not in steps]
    if missing:
        raise UserError(
            f"{model_dir} has no checkpoint of step {missing[0]}; it has "
            f"{', '.join(map(str, steps))}"
        )
    return wanted


def on_this_machine(config: "Config") -> "Config":
    """The run's configuration for this process alone: on its mesh if that fits the devices here,
    else on all of them, rows divided."""
    import jax

    from trainer.config.mesh import MeshConfig
    from trainer.engine.processes import ProcessesConfig

    config = dataclasses.replace(config, processes=ProcessesConfig())
    try:
        config.mesh.sizes(jax.device_count())
    except UserError:
        config = dataclasses.replace(config, mesh=MeshConfig(), microbatches=1)
    return config


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m trainer.evaluate", description="Evaluates checkpoints.")
    parser.add_argument("--model_dir", required=True, help="where trainer.pretrain wrote")
    parser.add_argument("--checkpoints", default="latest", help="all, latest, or steps: 1000,2000")
    parser.add_argument("--split", default="validation", help="split of the cache")
    parser.add_argument("--cache_dir", help="the cache, if it is no longer where training found it")
    parser.add_argument(
        "--batch_size", type=int, help="rows at a time; changes the result of Switch layers alone"
    )
    arguments = parser.parse_args(argv)

    from trainer.config import fields, load_config

    config, origins = load_config(arguments.model_dir)
    overrides = {
        "model_dir": arguments.model_dir,
        "cache_dir": arguments.cache_dir,
        "evaluation.batch_size": arguments.batch_size,
    }
    for path, value in overrides.items():
        if value is not None:
            config = fields.replace(config, path, value)
    config = on_this_machine(config)

    from trainer.checkpoint import Checkpoints
    from trainer.engine.program import Program
    from trainer.setup import prepare

    run = prepare(config, origins)
    checkpoints = Checkpoints(arguments.model_dir, writable=False)
    steps = chosen_steps(arguments.checkpoints, checkpoints.steps(), arguments.model_dir)
    program = Program(run)
    evaluator = Evaluator(run, arguments.split, program.evaluation_step, program.mesh)
    results = {}
    for step in steps:
        results[step] = evaluator(checkpoints.restore(step, program.abstract_state()).params)
    checkpoints.close()
    files.write_json(
        files.join(arguments.model_dir, EVALUATION_FILE),
        {"checkpoints": {str(step): result for step, result in results.items()}},
    )
    print(table(results))


def table(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """A line a checkpoint: step, loss, perplexity, accuracy, nats below the unigram entropy,
    and bits a byte where there are any; of a mixture, a line more for each of its tasks."""
    headings = f"{'step':>9} {'loss':>8} {'perplexity':>11} {'accuracy':>9} {'below unigram':>14}"
    coded = any(
        "bits_per_byte" in one for by_split in results.values() for one in by_split.values()
    )
    lines = [headings + f" {'bits/byte':>10}" * coded]
    for step, by_split in results.items():
        for split, result in by_split.items():
            gain = result["unigram_entropy"] - result["loss"]
            shown = result["perplexity"]
            bits = f" {result.get('bits_per_byte', math.nan):>10.4f}" * coded
            line = (
                f"{step:>9} {result['loss']:>8.4f} "
                f"{shown if math.isfinite(shown) else math.inf:>11.2f} "
                f"{result['accuracy']:>9.4f} {gain:>9.3f} nats{bits} {split.partition('/')[2]}"
            )
            lines.append(line.rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
