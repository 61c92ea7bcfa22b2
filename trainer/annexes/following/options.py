"""Settings of a run that follows the build of its caches."""

from dataclasses import dataclass

from tasks.terminal.flag_fields import Checked, ReadIf, above, at_least, field
from trainer.config.data import ON_CACHES

_ON = ReadIf(lambda config: config.following.on, "without --follow", whole=True)


@dataclass(frozen=True)
class FollowingConfig(Checked):
    """Training while the caches are being built."""

    on: bool = field(
        False,
        "train while the caches are being built: the first epoch reads shards in the planned "
        "order and waits if it overtakes the build; finished caches give the same batches "
        "(docs/training.md)",
        often="train while the cache is being built",
        aliases=("--follow", "--data.follow"),
        read_if=ON_CACHES,
    )
    shards: int = field(
        4,
        "with follow, number of shards shuffled together in the first epoch and read by "
        "evaluations during the run; 1 or more",
        rule=at_least(1),
        aliases=("--data.follow_shards",),
        read_if=_ON,
    )
    timeout_seconds: float | None = field(
        3600.0,
        "with follow, seconds to wait if no build is running and no shard is finished; None: no "
        "limit",
        rule=above(0),
        aliases=("--data.follow_timeout_seconds",),
        read_if=_ON,
        changes="nothing",
    )
