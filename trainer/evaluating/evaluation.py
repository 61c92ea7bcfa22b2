"""Everything that an evaluation of a split computes."""

import re
from collections.abc import Callable
from typing import Any

from tasks.metrics.metric import TEXT
from tasks.questions import scores
from tasks.storage import files
from trainer.config.averages import label as label_of
from trainer.data.interface import Run
from trainer.engine import processes
from trainer.engine.evaluator import TOKEN_METRICS, Evaluator
from trainer.engine.program import Program
from trainer.evaluating.predictions import PREDICTIONS, Predicting
from trainer.evaluating.suite import Suite

# split -> metric -> value.
Results = dict[str, dict[str, float]]


def _of_text(name: str) -> str:
    """Returns a text metric's name in results; plain "accuracy" is token accuracy."""
    return f"{TEXT}{name}" if name in TOKEN_METRICS else name


class Evaluation:
    """Evaluates a split: losses, metrics of generated text, and a suite."""

    def __init__(self, run: Run, split: str, program: Program, label: str | None = None):
        """`label` names the split in results and files; by default, the split's own name."""
        config = run.config
        self._label = label or split
        self._split, self._model_dir = split, config.model_dir
        self._losses = Evaluator(run, split, program.evaluation_step, program.mesh)
        generates = bool(config.evaluation.metrics) and config.model.architecture != "encoder"
        predicting = Predicting(run, split, program) if generates else None
        self._predicting = predicting if predicting and predicting.sets else None
        self._suite = Suite(run, program) if config.evaluation.suite else None
        if self._suite:
            self._suite.check_watched()

    def __call__(
        self,
        params: Any,
        step: int,
        stopping: Callable[[], bool] = lambda: False,
        average: str | None = None,
    ) -> Results | None:
        """Returns metrics by split for the parameters after `step`; None if abandoned.

        `average` marks results and predictions as an average's.

        Writes predictions to MODEL_DIR/predictions/SPLIT_STEP.jsonl and the suite's answers to
        MODEL_DIR/suite/STEP.jsonl. Text metrics join `Evaluator`'s under the split's name; the
        suite's are under "suite/SET".
        """

        def marked(split: str) -> str:
            return label_of(split, average) if average else split

        results = self._losses(params, stopping)
        if results is None:
            return None
        if self._predicting:
            name = re.sub(r"[^\w.-]", "_", marked(self._label))
            output = files.join(self._model_dir, PREDICTIONS, f"{name}_{step}.jsonl")
            found = self._predicting(params, output, stopping)
            if found is None:
                return None
            for split, values in found.items():
                named = {_of_text(name): value for name, value in values.items()}
                results.setdefault(split, {}).update(named)
        size = len(self._split)
        results = {self._label + name[size:]: values for name, values in results.items()}
        if self._suite:
            answered = self._suite(params, stopping)
            if answered is None:
                return None
            name = f"{step}.{average}" if average else str(step)
            if processes.is_first():
                scores.write(scores.path(self._model_dir, name), answered)
            results |= scores.results(scores.of(answered))
        return {marked(name): values for name, values in results.items()}
