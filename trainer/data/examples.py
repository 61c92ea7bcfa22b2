"""Examples for evaluating generated text: prompts, answers and their comparison.

Dimensions: W examples, N positions of an example, B rows of a batch, L positions of a row.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tasks import annexes, decode
from tasks.metrics import metric
from tasks.metrics.metric import Metric
from tasks.objectives import Examples, noise
from tasks.terminal.command_line import UserError, nearest
from tasks.vocabulary import TokenIds
from trainer.config.evaluation import TASK_METRICS
from trainer.config.run import Config
from trainer.data.features import Batch, Converter, token_places


class Example(NamedTuple):
    """A prompt and its answer: ids, int32 [tokens] as in training, and texts.

    `target` is what metrics compare with: the text, or the task's value for it. `row` is the
    task's own row, for its postprocessing of predictions.
    """

    inputs: np.ndarray
    targets: np.ndarray
    inputs_text: str
    targets_text: str
    target: Any
    row: Any = None


class Outputs(NamedTuple):
    """A model's outputs, one per example.

    `ids`, int32 [tokens], EOS included, and `scores`, their log probabilities, are None if nothing
    was generated; `target_scores`, log likelihoods of the answers, None if not computed.
    """

    ids: list[np.ndarray] | None = None
    scores: list[float] | None = None
    target_scores: list[float] | None = None


class OutputMetric(NamedTuple):
    """A metric of outputs; it reads generated ids if `generates`, else scores of answers."""

    generates: bool
    compute: Callable[[Sequence[Example], Outputs], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class ExampleSet:
    """The examples of a task's split, and its metrics.

    `read` returns at most the given number of examples; `postprocess` turns a text into the
    prediction that metrics compare. Metrics are `predicted`, of (targets, predictions);
    `scored`, of (targets, log likelihoods of the answers); `with_scores`, of (targets, predictions,
    {"scores": log likelihoods of predictions}); and `of_outputs`.
    """

    name: str
    read: Callable[[int | None], list[Example]]
    decode: Callable[[Sequence[int]], str]
    postprocess: Callable[[str, Example], Any]
    predicted: tuple[Metric, ...] = ()
    scored: tuple[Metric, ...] = ()
    with_scores: tuple[Callable[..., Any], ...] = ()
    of_outputs: tuple[OutputMetric, ...] = ()

    @property
    def measured(self) -> bool:
        """True if the set has a metric."""
        return self.generates or self.scores_targets

    @property
    def generates(self) -> bool:
        """True if a metric reads generated text."""
        needed = any(output.generates for output in self.of_outputs)
        return bool(self.predicted or self.with_scores or needed)

    @property
    def scores_targets(self) -> bool:
        """True if a metric reads the likelihoods of the answers."""
        return bool(self.scored) or not all(output.generates for output in self.of_outputs)


class Judge(Protocol):
    """A task that postprocesses texts before its metrics compare them."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    @property
    def postprocess(self) -> Callable[[str, dict[str, Any], bool], Any] | None:
        """(text, {"targets": text}, is it the target?) -> value for metrics; None: the text."""


def judge_of(config: Config) -> Judge | None:
    """Returns the task that `evaluation.supervised` names; raises UserError if there is none."""
    name = config.evaluation.supervised
    if name is None:
        return None
    known: dict[str, Judge] = {k: v for table in annexes.every("judges") for k, v in table.items()}
    if name not in known:
        raise UserError(
            f"unknown supervised task {name}{nearest(name, known)}; known: {', '.join(known)}"
        )
    return known[name]


def named_metrics(config: Config) -> tuple[Metric, ...]:
    """Returns the metrics named by `evaluation.metrics`, without the task's own."""
    names = [name for name in config.evaluation.metrics if name != TASK_METRICS]
    return tuple(metric.chosen(names, config.task_module)) if names else ()


def of_batches(
    name: str,
    batches: Callable[[], Iterable[Batch]],
    ids: TokenIds,
    metrics: tuple[Metric, ...],
    judge: Judge | None = None,
) -> ExampleSet:
    """Returns the examples in the rows of batches, one example per row.

    A row's prompt is all that precedes its first weighted target: the encoder's input, or the
    beginning of a decoder-only model's row. Rows without targets are skipped. `judge` is the task
    that postprocesses texts before metrics, if any.
    """

    def text_of(tokens: Iterable[int]) -> str:
        return decode.decode([int(token) for token in tokens], ids)

    def target_of(tokens: np.ndarray) -> str:
        # An unknown piece in a prediction must not equal one in the target.
        parts = zip(tokens.tolist(), decode.texts(tokens.tolist(), ids), strict=True)
        unknown = ids.special.unk
        found = [decode.REPLACEMENT if token == unknown else text for token, text in parts]
        return "".join(found).removeprefix(" ")

    def read(limit: int | None) -> list[Example]:
        found: list[Example] = []
        for batch in batches():
            for row in range(len(batch["decoder_target_tokens"])):
                if limit is not None and len(found) == limit:
                    return found
                weighted = np.flatnonzero(batch["decoder_loss_weights"][row])
                if not len(weighted):
                    continue
                row_L = batch["decoder_target_tokens"][row]
                targets = row_L[weighted[0] : weighted[-1] + 1]
                inputs = row_L[: weighted[0]]
                if "encoder_input_tokens" in batch:
                    end = np.flatnonzero(token_places(batch, "encoder")[row])[-1] + 1
                    inputs = batch["encoder_input_tokens"][row, :end]
                text = target_of(_before_eos(targets, ids.special.eos))
                target = _judged(judge, text, text, is_target=True)
                found.append(Example(inputs, targets, text_of(inputs), text, target))
        return found

    def postprocess(text: str, example: Example) -> Any:
        return _judged(judge, text, example.targets_text, is_target=False)

    return ExampleSet(name, read, text_of, postprocess, metrics)


def _judged(judge: Judge | None, text: str, targets: str, is_target: bool) -> Any:
    """Returns the value that metrics compare, for a prediction or for `targets` itself."""
    if judge is None or judge.postprocess is None:
        return text
    try:
        return judge.postprocess(text, {"targets": targets}, is_target)
    except KeyError as error:
        raise UserError(
            f"--evaluation.supervised={judge.name} reads {error} of examples, but caches do not "
            f"hold it{annexes.advice('judges')}"
        ) from error


def _before_eos(tokens: np.ndarray, eos: int) -> np.ndarray:
    ends = np.flatnonzero(tokens == eos)
    return tokens[: ends[0]] if len(ends) else tokens


def rows_of(pairs: Sequence[tuple[np.ndarray, np.ndarray]], converter: Converter) -> Batch:
    """Returns the features of (inputs, targets), one example per row; truncates longer sides.

    An encoder predicts all of its targets, in one segment.
    """
    lengths = converter.lengths
    targets_WN, lengths_W = _padded([pair[1][: lengths.targets] for pair in pairs])
    examples: Examples = {"targets": (targets_WN, lengths_W)}
    if lengths.inputs:
        examples["inputs"] = _padded([pair[0][: lengths.inputs] for pair in pairs])
    if "segments" in converter.features:
        ones_WN = noise.within(lengths_W, targets_WN.shape[1]).astype(np.int32)
        unordered = np.zeros((len(pairs), 1), np.int32), np.ones(len(pairs), np.int64)
        one = ones_WN, lengths_W
        examples |= {"weights": one, "segments": one, "order": unordered}
    return converter(examples)


def _padded(sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 [W, N] padded with 0, and lengths int64 [W]."""
    lengths_W = np.array([len(sequence) for sequence in sequences])
    padded_WN = np.zeros((len(sequences), max(1, lengths_W.max(initial=0))), np.int32)
    for row, each in enumerate(sequences):
        padded_WN[row, : len(each)] = each
    return padded_WN, lengths_W
