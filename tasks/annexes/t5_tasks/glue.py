"""GLUE in T5's format.

Source: Raffel et al. 2020 (arXiv:1910.10683), appendix D; T5, `glue_utils`; Wang et al. 2019
(arXiv:1804.07461) for each task's metrics.
Differences: T5 also evaluates WNLI in the form of WSC and has the diagnostic set AX, whose labels
are not public.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.annexes.t5_tasks.template import Row, Supervised, TextPair, classification, joined

_SENTENCES = ("sentence1", "sentence2")
_ENTAILED = ("entailment", "not_entailment")
_ACCEPTABLE = ("unacceptable", "acceptable")
_EQUIVALENT = ("not_equivalent", "equivalent")
_NLI = ("entailment", "neutral", "contradiction")
# Similarities are rounded to multiples of 1 / _STEPS, which gives 26 texts.
_STEPS = np.float32(5)


def _similarity(row: Row) -> Iterator[TextPair]:
    # In float32, as in T5: this decides how 0.3, 0.7 and other midway values are rounded.
    score = np.round(np.float32(row["label"]) * _STEPS) / _STEPS
    yield {"inputs": joined("stsb", row, _SENTENCES), "targets": f"{score:.1f}"}


def _number(text: str, _pair: TextPair, _is_target: bool) -> Any:
    try:
        return float(text)
    except ValueError:
        return -1.0


TASKS = (
    classification("cola", "glue/cola", ("sentence",), _ACCEPTABLE, ("matthews",)),
    classification("sst2", "glue/sst2", ("sentence",), ("negative", "positive"), ("accuracy",)),
    classification("mrpc", "glue/mrpc", _SENTENCES, _EQUIVALENT, ("f1", "accuracy")),
    Supervised("glue_stsb", "glue/stsb", _similarity, ("pearson", "spearman"), _number),
    classification(
        "qqp", "glue/qqp", ("question1", "question2"), ("not_duplicate", "duplicate"),
        ("f1", "accuracy"),
    ),
    classification("mnli", "glue/mnli", ("hypothesis", "premise"), _NLI, ("accuracy",)),
    classification("qnli", "glue/qnli", ("question", "sentence"), _ENTAILED, ("accuracy",)),
    classification("rte", "glue/rte", _SENTENCES, _ENTAILED, ("accuracy",)),
    classification("wnli", "glue/wnli", _SENTENCES, _ENTAILED[::-1], ("accuracy",)),
)  # fmt: skip
