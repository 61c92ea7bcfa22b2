"""The One Billion Word benchmark: single sentences in random order, column `text`.

It has splits train and test, and is read from the Parquet files that the Hub makes of the data set.
It has no validation split, so one is held out.
"""

from tasks.task import TaskSpec, language_modeling_task, pretraining_tasks

_CORPUS = "hf:billion-word-benchmark/lm1b@refs/convert/parquet"

TASKS: tuple[TaskSpec, ...] = (
    *pretraining_tasks("lm1b", _CORPUS),
    # Primer holds out the last 2%; here 2% are chosen by a hash of their ids.
    language_modeling_task("lm1b", f"{_CORPUS}?validation=0.02"),
)
