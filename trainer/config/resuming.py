"""Settings that may change between a checkpoint and the run that resumes it."""

from tasks import mixture
from trainer.config import fields
from trainer.config.idle import unread_fields
from trainer.config.run import Config

# Fields that may differ between a checkpoint's run and the one that resumes it, because they do not
# change the parameters of earlier steps. The schedule of rates is compared up to the checkpoint.
# `on_nan` and `spike_factor` may change so that a stopped run can be resumed; updates already
# skipped stay skipped. Another mesh, number of microbatches or attention changes only the order of
# summation.
RESUMABLE_CHANGES = (
    "preset",
    "cache_dir",
    "model_dir",
    "task_module",
    "train_steps",
    "on_nan",
    "spike_factor",
    "profile_steps",
    "mixing.schedule",
    "vocabulary.",
    "data.local_",
    "data.threads",
    "data.prefetch",
    "checkpoint.",
    "evaluation.",
    "metrics.",
    "mesh.",
    "microbatches",
    "model.attention",
    "model.softmax_dtype",
    "model.remat",
    "tokens_per_microbatch_per_replica",
    "processes.",
)


def config_changes(before: Config, now: Config, step: int) -> list[str]:
    """Returns one message per field that differs and determines the parameters up to `step`."""
    old = dict(fields.leaves(before))
    unread = unread_fields(before).keys() & unread_fields(now).keys()
    found = [
        f"{path} was {old.get(path)}, is {value}"
        for path, value in fields.leaves(now)
        if old.get(path) != value and path not in unread and not path.startswith(RESUMABLE_CHANGES)
    ]
    schedules = [
        [entry for entry in mixture.parse_schedule(config.mixing.schedule) if entry[0] < step]
        for config in (before, now)
    ]
    if schedules[0] != schedules[1]:
        found.append(
            f"mixing.schedule was {before.mixing.schedule!r}, is {now.mixing.schedule!r}, "
            f"different before update {step}"
        )
    return found
