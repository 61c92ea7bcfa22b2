"""C4, the corpus of T5: English web pages, column `text`, splits train and validation.

Tasks are named after the T5 paper's experiments; Primer's task has its own name.
"""

from tasks.task import denoising_tasks, language_modeling_task, pretraining_tasks

_CORPUS = "hf:allenai/c4:en"

TASKS = (
    *pretraining_tasks("c4", _CORPUS),
    *denoising_tasks("c4", _CORPUS),
    # T5's name; the data are C4 3.0.1.
    language_modeling_task("c4_v220", _CORPUS),
)
