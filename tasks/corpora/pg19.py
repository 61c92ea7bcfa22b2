"""PG-19: books of Project Gutenberg from before 1919, in Parquet, column `text`.

It has splits train, validation and test. A book is one document of about half a megabyte.
"""

from tasks.task import TaskSpec, language_modeling_task, pretraining_tasks

_CORPUS = "hf:emozilla/pg19"

TASKS: tuple[TaskSpec, ...] = (
    *pretraining_tasks("pg19", _CORPUS),
    language_modeling_task("pg19", _CORPUS),
)
