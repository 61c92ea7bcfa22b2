"""C4, the corpus of T5: English web pages, column `text`, splits train and validation.

The T5 paper's objectives are here by the names of its experiments, and Primer's task by its own.
"""

from tasks.task import denoising_tasks, language_modeling_task, pretraining_tasks

_CORPUS = "hf:allenai/c4:en"

TASKS = (
    *pretraining_tasks("c4", _CORPUS),
    *denoising_tasks("c4", _CORPUS),
    # The data are of C4 3.0.1, whatever the name says.
    language_modeling_task("c4_v220", _CORPUS),
)
