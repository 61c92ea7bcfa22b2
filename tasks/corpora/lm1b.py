"""The One Billion Word benchmark: single sentences in random order, column `text`.

It is read from the Hub's Parquet conversion, with splits train and test; validation is held out.
"""

from tasks.task import TaskSpec, language_modeling_task, pretraining_tasks

_CORPUS = "hf:billion-word-benchmark/lm1b@refs/convert/parquet"

TASKS: tuple[TaskSpec, ...] = (
    *pretraining_tasks("lm1b", _CORPUS),
    # Primer holds out the last 2%; here a hash of the ids chooses 2%.
    language_modeling_task("lm1b", f"{_CORPUS}?validation=0.02"),
)
