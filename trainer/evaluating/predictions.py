"""Evaluation of generated text: predictions, their metrics, and a file of predictions."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID
from trainer.data.examples import Example, ExampleSet, Outputs
from trainer.data.prompts import prompt_form
from trainer.data.run import Run
from trainer.decoding.decoder import Decoder
from trainer.engine import processes
from trainer.engine.program import Program
from trainer.evaluating.likelihood import Likelihood

# Folder for predictions in model_dir.
PREDICTIONS = "predictions"
Stopping = Callable[[], bool]
# Number of batches to decode between checks for a stop.
_BATCHES_AT_ONCE = 4


class Predicting:
    """Generates text for a split's examples and computes the metrics of their tasks."""

    def __init__(self, run: Run, split: str, program: Program):
        config = run.config
        self._split, self._program = split, program
        self._limit = config.evaluation.examples
        self.sets = [task for task in run.data.examples(split) if task.measured]
        self._decoder: Decoder | None = None
        if not self.sets:
            return
        size = config.evaluation.batch_size or config.batch_size
        decoding = config.evaluation.decoding
        if decoding.num_return_sequences > 1:
            raise UserError(
                f"--evaluation.decoding.num_return_sequences={decoding.num_return_sequences}: "
                "metrics compare one prediction with each target"
            )
        reads_prefix = prompt_form(run).prefix
        decoding = dataclasses.replace(decoding, batch_size=size, prefix=reads_prefix)
        if any(each.generates for each in self.sets):
            mesh, special = program.mesh, run.converter.special
            self._decoder = Decoder(config.model, decoding, mesh, config.mesh.rules, special)
            if self._decoder.longest_prompt == 0:
                raise UserError(
                    f"--evaluation.decoding.max_new_tokens={decoding.max_new_tokens}: all of the "
                    f"model's {config.model.max_positions} positions, so none is left for a prompt"
                )
        self._likelihood = Likelihood(program, run.converter, size)
        self._at_once = _BATCHES_AT_ONCE * size
        self._examples: dict[str, list[Example]] = {}

    def __call__(
        self, params: Any, output: str | None, stopping: Stopping = lambda: False
    ) -> dict[str, dict[str, float]] | None:
        """Returns metrics by split: a task's under SPLIT/TASK, means over tasks under SPLIT.

        With one task there is only SPLIT. The first process writes a JSON line per example to
        `output`. When `stopping()` returns True, the evaluation is abandoned and None returned.
        """
        params = self._program.merged(params)
        by_task: dict[str, dict[str, float]] = {}
        lines: list[dict[str, Any]] = []
        for each in self.sets:
            found = self._task(params, each, stopping)
            if found is None:
                return None
            by_task[each.name], written = found
            lines += written
        if output and processes.is_first():
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            files.make_folder(output.rpartition("/")[0])
            files.write_bytes(output, text.encode())
        results = {self._split: means_over_tasks(by_task)}
        if len(by_task) > 1:
            results |= {f"{self._split}/{name}": values for name, values in by_task.items()}
        return results

    def _task(
        self, params: Any, task: ExampleSet, stopping: Stopping
    ) -> tuple[dict[str, float], list[dict[str, Any]]] | None:
        if task.name not in self._examples:
            self._examples[task.name] = task.read(self._limit)
        examples = self._examples[task.name]
        if not examples:
            raise UserError(f"the split {self._split} of {task.name} has no examples to evaluate")
        targets = [example.target for example in examples]
        lines: list[dict[str, Any]] = [
            {"task": task.name, "inputs": example.inputs_text, "targets": example.targets_text}
            for example in examples
        ]
        values: dict[str, float] = {}
        outputs = Outputs()
        if self._decoder:
            found = self._generated(params, task, examples, stopping)
            if found is None:
                return None
            texts, outputs = found
            scores = outputs.scores or []
            predictions = list(map(task.postprocess, texts, examples))
            columns = zip(lines, texts, predictions, scores, strict=True)
            for line, text, prediction, score in columns:
                line |= {"prediction": text, "score": score}
                if prediction != text:
                    line["postprocessed"] = plain(prediction)
            for metric in task.predicted:
                _add(values, task.name, metric(targets, predictions))
            for function in task.with_scores:
                _add(values, task.name, function(targets, predictions, {"scores": scores}))
        if task.scores_targets:
            pairs = [(example.inputs, example.targets) for example in examples]
            likelihoods = self._likelihood(params, pairs).tolist()
            for line, likelihood in zip(lines, likelihoods, strict=True):
                line["target_score"] = likelihood
            outputs = outputs._replace(target_scores=likelihoods)
            for metric in task.scored:
                _add(values, task.name, metric(targets, likelihoods))
        for of_outputs in task.of_outputs:
            _add(values, task.name, of_outputs.compute(examples, outputs))
        return values, lines

    def _generated(
        self, params: Any, task: ExampleSet, examples: Sequence[Example], stopping: Stopping
    ) -> tuple[list[str], Outputs] | None:
        """Returns predicted texts and outputs; None to abandon the evaluation."""
        assert self._decoder
        longest = self._decoder.longest_prompt
        texts: list[str] = []
        ids: list[np.ndarray] = []
        scores: list[float] = []
        with progress.shown(f"predicting {self._split} of {task.name}", len(examples)) as bar:
            for first in range(0, len(examples), self._at_once):
                some = examples[first : first + self._at_once]
                numbers_of = range(first, first + len(some))
                prompts = [each.inputs[:longest] for each in some]
                for decoded in self._decoder(params, prompts, numbers_of):
                    texts.append(task.decode([int(token) for token in decoded.ids]))
                    scores.append(float(decoded.score))
                    ids.append(np.append(decoded.ids, [EOS_ID] * decoded.ended).astype(np.int32))
                bar.update(len(texts))
                if stopping():
                    return None
        return texts, Outputs(ids, scores)


def means_over_tasks(by_task: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the tasks that have it."""
    names = dict.fromkeys(name for values in by_task.values() for name in values)
    of_tasks = {
        name: [values[name] for values in by_task.values() if name in values] for name in names
    }
    return {name: math.fsum(values) / len(values) for name, values in of_tasks.items()}


def plain(value: Any) -> Any:
    """Returns a prediction as a JSON value."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return str(value)


def _add(values: dict[str, float], task: str, found: Mapping[str, float]) -> None:
    for name, value in found.items():
        if name in values:
            raise UserError(f"two metrics of {task} have a value called {name}")
        values[name] = value
