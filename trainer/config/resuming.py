"""Settings that may change between a checkpoint and the run that resumes it."""

from tasks import mixture
from trainer.config import fields
from trainer.config.run import Config
from trainer.config.unused_fields import unread_fields

# Fields that may differ between a checkpoint's run and the one that resumes it, because they do not
# change the parameters of earlier steps. The schedule of rates is compared up to the checkpoint.
# `on_nan` and `spike_factor` may change so that a stopped run can be resumed; updates already
# skipped stay skipped. Another mesh, attention or choice of deterministic kernels changes only the
# order of summation, and so does another number of microbatches, except where `_parts_matter`.
RESUMABLE_CHANGES = (
    "preset",
    "cache_dir",
    "model_dir",
    "task_module",
    "train_steps",
    "on_nan",
    "spike_factor",
    "deterministic",
    "profile_steps",
    "mixing.schedule",
    "vocabulary.",
    "data.local_",
    "data.threads",
    "data.prefetch",
    "data.follow_timeout_seconds",
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


def _parts_matter(config: Config) -> str:
    """Returns why the number of microbatches changes more than the order of sums; "" if not."""
    if config.model.dropout_rate > 0:
        return "each part of the batch draws its own dropout"
    if config.loss.normalize_over == "microbatch" and config.loss.normalizer != "sum":
        return "each part of the batch is normalized by itself (loss.normalize_over)"
    if config.model.num_experts > 0:
        return "tokens are routed to experts within a part of the batch"
    return ""


def config_changes(before: Config, now: Config, step: int) -> list[str]:
    """Returns one message per field that differs and determines the parameters up to `step`."""
    old = dict(fields.leaves(before))
    unread = unread_fields(before).keys() & unread_fields(now).keys()
    found = [
        f"{path} was {old.get(path)}, is {value}"
        for path, value in fields.leaves(now)
        if old.get(path) != value and path not in unread and not path.startswith(RESUMABLE_CHANGES)
    ]
    if before.microbatches != now.microbatches and (why := _parts_matter(now)):
        found.append(f"microbatches was {before.microbatches}, is {now.microbatches}, and {why}")
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
