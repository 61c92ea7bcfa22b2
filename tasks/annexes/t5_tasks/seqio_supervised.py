"""Registers supervised tasks, which turn rows of a data set into text pairs, as seqio Tasks.

from tasks.annexes.t5_tasks import seqio_supervised
from tasks.annexes.t5_tasks import table

seqio_supervised.register(table.get("glue_cola"), {"train": rows, "validation": others},
                          "VOCABULARY_DIR/sentencepiece.model")
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import seqio
import tensorflow as tf

from tasks.annexes.t5_tasks.template import Row, Supervised
from tasks.metrics.metric import Metric

# Feature with the further values of an example for evaluation, as JSON.
_PAIR = "pair"


def register(
    task: Supervised,
    rows: Mapping[str, Callable[[], Iterable[Row]]],
    vocabulary_path: str,
    extra_ids: int = 0,
) -> seqio.Task:
    """Registers a task with its postprocessor and metrics, replacing an earlier one; returns it.

    `rows` maps each split to a function that returns its rows; all splits but "train" are for
    evaluation. `extra_ids` sentinels are added to the pieces of the SentencePiece model.
    """
    vocabulary = seqio.SentencePieceVocabulary(vocabulary_path, extra_ids=extra_ids)
    signature = {name: tf.TensorSpec((), tf.string) for name in ("inputs", "targets", _PAIR)}

    def read(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed

        def pairs() -> Iterable[dict[str, str]]:
            for pair in task.examples(rows[split](), evaluating=split != "train"):
                yield {
                    "inputs": pair["inputs"],
                    "targets": pair["targets"],
                    _PAIR: json.dumps(pair),
                }

        return tf.data.Dataset.from_generator(pairs, output_signature=signature)

    def judged(text: str, example: Mapping[str, Any], is_target: bool) -> Any:
        if task.postprocess is None:
            return text
        return task.postprocess(text, json.loads(example[_PAIR]), is_target)

    seqio.TaskRegistry.remove(task.name)
    return seqio.TaskRegistry.add(
        task.name,
        source=seqio.FunctionDataSource(read, splits=list(rows)),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={side: seqio.Feature(vocabulary) for side in ("inputs", "targets")},
        postprocess_fn=judged,
        metric_fns=[_function(metric) for metric in task.own_metrics],
    )


def _function(metric: Metric) -> Callable[..., dict[str, float]]:
    """Returns a metric as a function whose argument names tell seqio its kind."""

    def function(targets: Any, predictions: Any) -> dict[str, float]:
        return metric(targets, predictions)

    function.__name__ = metric.name
    return function
