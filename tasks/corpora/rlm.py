"""The Romanian language-model corpus. Write a file like this one for a corpus of your own."""

from tasks.task import pretraining_tasks

TASKS = pretraining_tasks("rlm", corpus="hf:dumitrescustefan/rlm")
