"""Rates at which a run reads its tasks, from its configuration and its caches' manifests."""

import dataclasses
from collections.abc import Mapping, Sequence

from tasks import mixture, registry
from tasks.cache import language_set
from tasks.cache.manifest import CacheManifest
from tasks.mixture import MixtureSpec
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import CONFIG_FILE, Config, load_record
from trainer.data.batches import Source

# Settings of `config.mixing` that replace the mixture's own.
_OF_MIXTURE = ("maximum", "temperature", "alpha", "size", "max_epochs")
# Size measure of tasks -> count in manifests.
_COUNTS = {"documents": "documents", "tokens": "tokens", "bytes": "text_bytes"}


def mixtures_of(config: Config) -> list[tuple[int, MixtureSpec]]:
    """Returns (updates made before, mixture) of the run's first mixture and its schedule."""
    known = registry.mixtures(config.task_module)
    first = known.get(config.task) or _languages(config) or mixture.parse(config.task)
    try:
        entries = [(0, first), *mixture.parse_schedule(config.mixing.schedule)]
    except UserError as error:
        raise UserError(f"--mixing.schedule: {error}") from error
    changed = {
        name: value for name in _OF_MIXTURE if (value := getattr(config.mixing, name)) is not None
    }
    if len(first.tasks) == 1 and changed:
        raise UserError(f"--mixing.{next(iter(changed))} has no effect: {config.task} is one task")
    found = [
        (step, mixture.checked(**{**dataclasses.asdict(each), **changed})) for step, each in entries
    ]
    if len(found) > 1 and any(each.max_epochs for _, each in found):
        raise UserError(
            "--mixing.max_epochs distributes the rows of the whole run, but --mixing.schedule "
            "changes rates within it: leave out one of them"
        )
    return found


def _languages(config: Config) -> MixtureSpec | None:
    """Returns the mixture of a task's languages, or None; a run keeps those it began with."""
    task = registry.find(config.task, config.task_module)
    if task is None or not config.cache_dir:
        return None
    names = language_set.tasks_of(
        config.cache_dir, task.name, registry.relatives(task, config.task_module)
    )
    if names and config.model_dir and files.exists(files.join(config.model_dir, CONFIG_FILE)):
        begun = load_record(config.model_dir).get("tasks", {})
        names = [name for name in names if name in begun] or names
    return MixtureSpec(task.name, tuple((name, None) for name in names)) if names else None


def rates(
    config: Config,
    sources: Sequence[Source],
    manifests: Mapping[str, CacheManifest],
    knows_sizes: bool,
) -> list[tuple[int, list[float]]]:
    """Returns (updates made before, share of each source) for the first mixture and each change.

    Without known sizes, `trainer.data.caches` has rejected rates that depend on them.
    """
    changes = []
    for step, spec in mixtures_of(config):
        unknown = dict.fromkeys(spec.names, 1.0)
        sizes = _sizes(spec.size, sources, manifests) if knows_sizes else unknown
        weights = spec.weights(sizes)
        if spec.max_epochs is None:
            total = sum(weights.values())
            shares = {name: weight / total for name, weight in weights.items()}
        else:
            shares = _limited(config, weights, sources, spec.max_epochs)
        changes.append((step, [shares.get(source.task, 0.0) for source in sources]))
    return changes


def _sizes(
    size: str, sources: Sequence[Source], manifests: Mapping[str, CacheManifest]
) -> dict[str, float]:
    if size not in _COUNTS:
        return {source.task: len(source.maker.windows) for source in sources}
    return {
        source.task: manifests[source.task].total("train", _COUNTS[size])
        * source.maker.windows.taken_share
        for source in sources
    }


def _limited(
    config: Config, weights: Mapping[str, float], sources: Sequence[Source], max_epochs: float
) -> dict[str, float]:
    """Returns shares that read no task more than `max_epochs` times."""
    epochs = {source.task: source.layout.rows_per_epoch for source in sources}
    limits = {name: max_epochs * epochs[name] for name in weights}
    try:
        return mixture.limited_shares(weights, limits, config.phases.passed(config.train_steps))
    except ValueError as error:
        most = config.phases.batches(int(sum(limits.values())))
        raise UserError(
            f"--mixing.max_epochs={max_epochs:g} leaves nothing to read after update {most:,}: "
            f"{error}; set --train_steps to {most} or less, or allow more epochs"
        ) from error
