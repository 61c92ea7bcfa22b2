"""Supervised tasks, which make texts from rows and judge predictions."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tasks.metrics.metric import METRICS, Metric

Row = Mapping[str, Any]
# {"inputs", "targets"}, both texts, and further values for some metrics.
TextPair = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Supervised:
    """A supervised task, independent of where its rows are stored."""

    name: str  # T5's name if T5 has the task
    source: str  # the rows' data set and configuration on the Hugging Face Hub
    pairs: Callable[[Row], Iterable[TextPair]]  # a row -> its examples; most rows have one
    metrics: tuple[str, ...]  # names in `tasks.metrics.metric.METRICS`
    # (text, pair, is_target) -> value for metrics; None uses the text.
    postprocess: Callable[[str, TextPair, bool], Any] | None = None
    trains_on: Callable[[Row], bool] | None = None  # None trains on all rows

    def examples(self, rows: Iterable[Row], evaluating: bool = False) -> Iterator[TextPair]:
        """Yields the examples of rows, in order; when `evaluating`, only the first per row."""
        for row in rows:
            if evaluating:
                yield from itertools.islice(self.pairs(row), 1)
            elif self.trains_on is None or self.trains_on(row):
                yield from self.pairs(row)

    def evaluate(self, pairs: Sequence[TextPair], predictions: Sequence[str]) -> dict[str, float]:
        """Returns the metrics of `predictions`, one text per example."""
        judged = self.postprocess or (lambda text, _pair, _is_target: text)
        targets = [judged(pair["targets"], pair, True) for pair in pairs]
        given = [judged(text, pair, False) for text, pair in zip(predictions, pairs, strict=True)]
        found: dict[str, float] = {}
        for metric in self.own_metrics:
            found |= metric(targets, given)
        return found

    @property
    def own_metrics(self) -> tuple[Metric, ...]:
        return tuple(METRICS[name] for name in self.metrics)


def joined(name: str, row: Row, keys: Sequence[str]) -> str:
    """Returns "NAME key: value key: value", T5's format."""
    if any(row[key] is None for key in keys):
        raise TypeError("null")
    return " ".join([name, *(f"{key}: {row[key]}" for key in keys)])


# Target of unlabelled rows. Source: T5, `preprocessors.glue`.
UNKNOWN = "<unk>"


def classification(
    name: str, source: str, keys: Sequence[str], labels: Sequence[str], metrics: tuple[str, ...]
) -> Supervised:
    """Returns a task whose target is the name of `label`; metrics use its number.

    A prediction that is not a label becomes -1, which is always wrong.
    """

    def pairs(row: Row) -> Iterator[TextPair]:
        label = int(row["label"])
        yield {
            "inputs": joined(name, row, keys),
            "targets": labels[label] if label >= 0 else UNKNOWN,
        }

    def number(text: str, _pair: TextPair, _is_target: bool) -> int:
        return labels.index(text) if text in labels else -1

    benchmark = source.partition("/")[0]
    return Supervised(f"{benchmark}_{name}", source, pairs, metrics, number)
