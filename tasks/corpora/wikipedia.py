"""English Wikipedia of November 2023, cleaned, in Parquet, columns `id`, `url`, `title` and `text`.

Validation is held out. For a different language, pass `--corpus` with its CONFIG.
"""

from tasks.task import pretraining_tasks

TASKS = pretraining_tasks("wikipedia", corpus="hf:wikimedia/wikipedia:20231101.en")
