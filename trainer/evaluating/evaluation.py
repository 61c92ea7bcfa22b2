"""Everything that an evaluation of a split computes."""

import re
from collections.abc import Callable
from typing import Any

from tasks.metrics.metric import TEXT
from tasks.storage import files
from trainer.config.averages import label as label_of
from trainer.data.run import Run
from trainer.engine.evaluator import TOKEN_METRICS, Evaluator
from trainer.engine.program import Program
from trainer.evaluating.predictions import PREDICTIONS, Predicting

# split -> metric -> value.
Results = dict[str, dict[str, float]]


def _of_text(name: str) -> str:
    """Returns a text metric's name in results; plain "accuracy" is token accuracy."""
    return f"{TEXT}{name}" if name in TOKEN_METRICS else name


class Evaluation:
    """Evaluates a split: losses, metrics of generated text, and what annexes add."""

    def __init__(self, run: Run, split: str, program: Program, label: str | None = None):
        """`label` names the split in results and files; by default, the split's own name."""
        config = run.config
        self._label = label or split
        self._split, self._model_dir = split, config.model_dir
        self._losses = Evaluator(run, split, program.evaluation_step, program.mesh)
        generates = bool(config.evaluation.metrics) and config.model.has_decoder
        predicting = Predicting(run, split, program) if generates else None
        self._predicting = predicting if predicting and predicting.sets else None
        self._others = [kind(run, program) for kind in config.entries("evaluations")]

    def __call__(
        self,
        params: Any,
        step: int,
        stopping: Callable[[], bool] = lambda: False,
        average: str | None = None,
    ) -> Results | None:
        """Returns metrics by split for the parameters after `step`; None if abandoned.

        `average` marks results and predictions as an average's.

        Writes predictions to MODEL_DIR/predictions/SPLIT_STEP.jsonl. Text metrics join
        `Evaluator`'s under the split's name. An annex's entry NAME of "evaluations" has its own
        under NAME, and files in MODEL_DIR/NAME that begin with the step.
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
        for other in self._others:
            more = other(params, f"{step}.{average}" if average else str(step), stopping)
            if more is None:
                return None
            results |= more
        return {marked(name): values for name, values in results.items()}
