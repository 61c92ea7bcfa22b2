"""Registers the benchmark's task; seqio_cache_tasks imports it with `--module_import`."""

import os

from tasks import seqio_tasks

seqio_tasks.register(
    os.environ["VOCABULARY"],
    corpus=os.environ["CORPUS"],
    names=["rlm_span_corruption"],
    extra_ids=int(os.environ["EXTRA_IDS"]),
)
