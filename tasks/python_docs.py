"""The built-in corpus: documentation and docstrings of the running Python's standard library."""

from tasks.task import pretraining_tasks

TASKS = pretraining_tasks("python_docs", corpus="python_docs")
