"""English Wikipedia of November 2023, cleaned, columns `id`, `url`, `title` and `text`, in Parquet.
It has no validation split: one is held out. Other languages: `--corpus` with another CONFIG."""

from tasks.task import pretraining_tasks

TASKS = pretraining_tasks("wikipedia", corpus="hf:wikimedia/wikipedia:20231101.en")
