"""Holds the pairs of a finished cache against the lengths of the runs that will read them."""

from collections.abc import Mapping

from palimpsest.annexes.recipes import stage_state
from palimpsest.annexes.recipes.derived_flags import RUNS
from palimpsest.annexes.recipes.recipe import Recipe, Stage
from palimpsest.commands import COMMANDS, command
from tasks import registry
from tasks.cache.manifest import CacheManifest
from tasks.cache.pair_windows import refuse_longer
from tasks.document_kind import SIDES, DocumentKind
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import flags_of, parse
from trainer.config import field_paths

# Files and schedules that may say other lengths than the keys.
_UNKNOWN = ("gin_file", "length_schedule")


def check(recipe: Recipe, cache: Stage, states: Mapping[str, stage_state.State]) -> None:
    """Raises UserError if a pair of a finished cache is too long for a run that is not finished.

    The run itself would say so only after all stages before it.
    """
    cache_dir = cache.output.rpartition("/")[0]
    # A cache of several languages has one for each.
    folders = [files.join(cache_dir, name) for name in states[cache.name].made or ()]
    manifests = {folder: CacheManifest.load(folder) for folder in folders}
    for stage in recipe.stages:
        reads = stage.kind in RUNS and cache.name in stage.needs
        known = not {*_UNKNOWN} & stage.flags.keys()
        if reads and known and states[stage.name].word != stage_state.FINISHED:
            for folder, manifest in manifests.items():
                if manifest.plan.unit is DocumentKind.PAIR:
                    _check(stage, folder, manifest)


def _check(stage: Stage, folder: str, manifest: CacheManifest) -> None:
    kind = command(COMMANDS[stage.command]).flags
    values = parse(kind, stage.words).values
    given = {flag.name: values[flag.path] for flag in flags_of(kind) if flag.path in values}
    task = registry.get(manifest.plan.task, given.get("task_module"))
    objective = field_paths.with_settings(
        task.objective, given.get("objective", ()), "objective", f"the objective of {task.name}"
    )
    set_here = [given.get(f"lengths.{side}") for side in SIDES]
    lengths = [
        getattr(task.lengths, side) if length is None else length
        for side, length in zip(SIDES, set_here, strict=True)
    ]
    try:
        refuse_longer(folder, manifest, objective, Lengths(*lengths))
    except UserError as error:
        raise UserError(f"[{stage.name}] {error}") from error
