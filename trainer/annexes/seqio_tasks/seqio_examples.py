"""Examples of seqio tasks with their own metrics, read and compared as in seqio's Evaluator.

Only `trainer.annexes.seqio_tasks.seqio_data` imports seqio and TensorFlow; it passes the tasks in.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tasks.metrics.metric import Metric
from trainer.config import Config
from trainer.config.evaluation import TASK_METRICS
from trainer.data.examples import Example, ExampleSet, OutputMetric, Outputs, named_metrics

# Names of the supported seqio `ModelOutputType`s.
_PREDICTION, _WITH_SCORES, _SCORE = "PREDICTION", "PREDICTION_WITH_AUX", "SCORE"


def unmeasured(task: Any) -> list[str]:
    """Returns the names of a task's metric objects that read unsupported outputs."""
    known = (_PREDICTION, _WITH_SCORES, _SCORE)
    objects = _own_objects(task)
    return [_name(each) for each in objects if each.model_output_type.name not in known]


def _own_objects(task: Any) -> list[Any]:
    """Returns a task's metric objects without those that seqio makes from metric functions."""
    objects = list(task.metric_objs)
    return objects[: len(objects) - len(task.metric_fns)]


def _name(metric: Any) -> str:
    return getattr(metric, "__name__", type(metric).__name__)


def _object_metric(task: Any, metric: Any) -> OutputMetric:
    """Returns one of seqio's metric objects as a metric of outputs.

    Source: seqio 0.0.20, `Evaluator._compute_clu_metrics`.
    """
    kind = metric.model_output_type.name

    def compute(examples: Sequence[Example], outputs: Outputs) -> Mapping[str, float]:
        rows, made = [example.row for example in examples], _model_output(kind, outputs)
        state = metric.from_model_output(rows, made, task.output_features, "targets")
        if hasattr(state, "actual_compute"):  # it collects whole outputs
            values, _ = state.actual_compute(rows, task.output_features, "targets", None)
        else:
            values = state.compute()
        return _numbers(values if isinstance(values, Mapping) else {_name(metric): values})

    return OutputMetric(kind != _SCORE, compute)


def _model_output(kind: str, outputs: Outputs) -> Any:
    """Returns outputs in the form that seqio's metrics read: ids are padded with 0."""
    if kind == _SCORE:
        return np.asarray(outputs.target_scores)
    assert outputs.ids is not None
    padded_WN = np.zeros((len(outputs.ids), max(map(len, outputs.ids))), np.int32)
    for row_N, ids in zip(padded_WN, outputs.ids, strict=True):
        row_N[: len(ids)] = ids
    if kind == _PREDICTION:
        return padded_WN
    return padded_WN, {"scores": np.asarray(outputs.scores)}


def examples_of(
    task: Any, split: str, lengths: Mapping[str, int], cached: bool, config: Config
) -> ExampleSet:
    """Returns the examples of a seqio Task's split, truncated to `lengths` as in training.

    Source: seqio 0.0.20, `Evaluator` and `PassthroughLegacyMetric`, for the arguments of
    postprocessors and metrics.
    """
    vocabulary = task.output_features["targets"].vocabulary
    read_inputs = "inputs" in lengths

    def postprocessed(text: str, row: Any, is_target: bool) -> Any:
        return task.postprocess_fn(text, example=row, is_target=is_target)

    def read(limit: int | None) -> list[Example]:
        dataset = task.get_dataset(
            lengths, split, use_cached=cached, shuffle=False, seed=config.seed, num_epochs=1
        )
        found = []
        for row in dataset.take(-1 if limit is None else limit).as_numpy_iterator():
            targets = np.asarray(row["targets"], np.int32)
            inputs = np.asarray(row["inputs"] if read_inputs else [], np.int32)
            target, prompt = _text(row, "targets", vocabulary), ""
            if read_inputs:
                prompt = _text(row, "inputs", task.output_features["inputs"].vocabulary)
            compared = postprocessed(target, row, True)
            found.append(Example(inputs, targets, prompt, target, compared, row))
        return found

    own = TASK_METRICS in config.evaluation.metrics
    missing = unmeasured(task)
    objects = [each for each in _own_objects(task) if own and _name(each) not in missing]
    return ExampleSet(
        task.name,
        functools.cache(read),
        vocabulary.decode,
        lambda text, example: postprocessed(text, example.row, False),
        (*(map(_metric, task.predict_metric_fns) if own else ()), *named_metrics(config)),
        tuple(map(_metric, task.score_metric_fns)) if own else (),
        tuple(map(_of_numbers, task.predict_with_aux_metric_fns)) if own else (),
        tuple(_object_metric(task, each) for each in objects),
    )


def _metric(function: Callable[..., Mapping[str, Any]]) -> Metric:
    return Metric(getattr(function, "__name__", str(function)), _of_numbers(function))


def _of_numbers(function: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, float]]:
    return lambda *arguments: _numbers(function(*arguments))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError):  # a text, or an array
            found[name] = float(getattr(value, "value", value))  # seqio's Scalar
    return found


def _text(row: Mapping[str, Any], feature: str, vocabulary: Any) -> str:
    """Returns the text before tokenization or, without it, the decoded ids."""
    text = row.get(f"{feature}_pretokenized")
    if text is None:
        return vocabulary.decode([int(token) for token in row[feature]])
    return text.decode() if isinstance(text, bytes) else str(text)
