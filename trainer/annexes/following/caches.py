"""Caches that may be unfinished, for a run that follows their build."""

import dataclasses
from collections.abc import Callable, Sequence

from tasks.cache import old_states, subset
from tasks.cache.cache import Cache
from tasks.cache.manifest import CacheManifest
from tasks.cache.subset import Take
from tasks.cache.windows import Windows
from tasks.document_kind import DocumentKind
from tasks.mixture import MixtureSpec
from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from trainer.annexes.following import building_cache
from trainer.annexes.following.building_cache import Following
from trainer.annexes.following.options import FollowingConfig
from trainer.annexes.following.order import FollowedOrder
from trainer.data import cached_task
from trainer.data.batches import BatchMaker
from trainer.data.cached_task import CachedTask
from trainer.data.caches import TRAIN, Caches
from trainer.data.order import Order, Reading


class UnfinishedCaches(Caches):
    """Caches whose shards may not all be known yet; a finished one gives the same batches."""

    knows_sizes = False
    more_shards = "raise --following.shards"

    @property
    def _following(self) -> FollowingConfig:
        return self.config.following  # type: ignore[attr-defined]

    def check(self, mixtures: Sequence[MixtureSpec]) -> None:
        follow = "with --follow"
        if self.config.engine != "palimpsest":
            raise UserError(
                f"--engine={self.config.engine} {follow}: the engine never waits; leave out one"
            )
        if self.config.mixing.max_epochs is not None or any(each.max_epochs for each in mixtures):
            raise UserError(f"--mixing.max_epochs {follow}: sizes are not known yet; leave out one")
        for mixture in mixtures:
            free = [name for name, rate in mixture.tasks if rate is None]
            if len(mixture.tasks) > 1 and free:
                raise UserError(
                    f"--task {follow}: the rate of {free[0]} follows from its size, which is not "
                    "known yet; give every task a rate, such as a=0.7,b=0.3"
                )

    def check_task(self, each: CachedTask, lengths: Lengths, wanted: Take | None) -> None:
        objective = each.task.objective
        follow = "with --follow"
        if wanted and wanted.unit == subset.SHARE:
            raise UserError(
                f"--data.take={wanted} {follow}: the total is not known yet; give an amount, such "
                "as '2^29 tokens' or '1000 documents'"
            )
        if objective.unit is DocumentKind.TEXT:
            return
        if self.config.data.pack_examples:
            raise UserError(
                f"--data.pack_examples=true {follow}: rows of pairs are packed once all lengths "
                "are known; leave out one of the two"
            )
        limits = each.manifest.plan.pairs
        if objective.cuts_sides or limits is None:
            return
        for side, most, limit in zip(
            ("inputs", "targets"),
            objective.sides(lengths),
            (limits.max_inputs, limits.max_targets),
            strict=True,
        ):
            if not 0 < limit <= most + 1:  # the limit counts EOS
                built = f"up to {limit:,} tokens" if limit else "any number of tokens"
                raise UserError(
                    f"{each.cache} may get {side} of {built} {follow}: build it with --max_{side}="
                    f"{most + 1} or less, or use --objective=too_long=cut"
                )

    def open(self, name: str, patient: bool = False) -> CachedTask:
        task, relatives = cached_task.found(self.config, name)
        timeout = self._following.timeout_seconds
        found = building_cache.find(self.config.cache_dir, task.name, relatives, patient, timeout)
        if not found:
            return super().open(name, patient)
        folder, state = found
        building = state if isinstance(state, Following) else None
        manifest = state.manifest if isinstance(state, Following) else state
        return CachedTask(task, folder, manifest, Cache(folder, manifest).ids, building)

    def reading(
        self,
        each: CachedTask,
        open_as: Callable[..., BatchMaker],
        wanted: Take | None,
        seed: int,
        order: Callable[[Windows], Order],
    ) -> tuple[BatchMaker, Reading]:
        if each.manifest.plan.adopted:
            open_as()  # this checks that no file of the other program has changed
        # The order adds shards in its own blocks, even for a finished cache.
        maker = open_as(manifest=_without_shards(each.manifest, TRAIN))
        shuffled = self.config.data.shuffle != "none"
        return maker, FollowedOrder(
            maker.windows,
            each,
            self._following,
            shuffled,
            wanted,
            seed,
            later=lambda: order(maker.windows),
        )

    def as_it_was(self, each: CachedTask, earlier: CacheManifest) -> CachedTask:
        if old_states.is_whole(earlier):
            return super().as_it_was(each, earlier)
        building = Following(each.cache, earlier.plan, known=earlier.splits)
        return dataclasses.replace(each, manifest=building.manifest, building=building)

    def evaluated(self, each: CachedTask, split: str, training: bool) -> CacheManifest:
        plan = each.manifest.plan
        if split not in plan.shards:
            return each.manifest
        count = min(plan.shards[split], self.first_shards(training) or plan.shards[split])
        if each.building:
            each.building.wait(split, count, self._following.timeout_seconds)
        first = {split: each.manifest.splits[split][:count]}
        return CacheManifest(plan, first, each.manifest.software)

    def first_shards(self, training: bool) -> int | None:
        return self._following.shards if training else None

    def lines(self, each: CachedTask, known: int | None) -> list[tuple[str, str]]:
        shards, done = self._following.shards, "all" if known is None else f"{known:,}"
        text = (
            f"{each.cache}: the first epoch reads its {each.manifest.plan.shards[TRAIN]:,} shards "
            f"in the order of the plan, {shards:,} at a time; {done} are read in so far; it waits "
            f"if it overtakes the build; evaluations read the first {shards:,} shards of their "
            "split"
        )
        return [("follow", text)]

    def close(self, each: CachedTask) -> None:
        if each.building:
            each.building.close()


def _without_shards(manifest: CacheManifest, split: str) -> CacheManifest:
    """Returns a manifest without the shards of a split."""
    known = {split: []} if split in manifest.plan.shards else manifest.splits
    return CacheManifest(manifest.plan, known, manifest.software)
