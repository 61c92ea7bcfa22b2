"""The Romanian language-model corpus. A user's own corpus family is a file like this one."""

from tasks.task import pretraining_tasks

TASKS = pretraining_tasks("rlm", corpus="hf:dumitrescustefan/rlm")
