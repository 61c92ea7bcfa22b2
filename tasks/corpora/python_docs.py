"""The built-in corpus: documentation of Python's standard library, which comes with the package."""

from tasks.task import denoising_tasks, pretraining_tasks

_CORPUS = "python_docs"

TASKS = (*pretraining_tasks("python_docs", _CORPUS), *denoising_tasks("python_docs", _CORPUS))
