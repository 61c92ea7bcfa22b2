"""The built-in corpus: documentation and docstrings of the running Python's standard library."""

from tasks.task import denoising_tasks, pretraining_tasks

_CORPUS = "python_docs"

TASKS = (*pretraining_tasks("python_docs", _CORPUS), *denoising_tasks("python_docs", _CORPUS))
