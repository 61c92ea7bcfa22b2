"""Registers the benchmark's task; seqio_cache_tasks imports it with `--module_import`."""

import os

from trainer.annexes.seqio_tasks import catalogue

catalogue.register(
    os.environ["VOCABULARY"],
    corpus=os.environ["CORPUS"],
    names=["rlm_span_corruption"],
    extra_ids=int(os.environ["EXTRA_IDS"]),
)
