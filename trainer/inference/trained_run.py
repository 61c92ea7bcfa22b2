"""Opens a trained run: restores its parameters on this machine and loads its vocabulary."""

import dataclasses
import sys
from typing import Any, cast

from tasks import vocabulary
from tasks.cache.cache import NoCache
from tasks.cache.checked_json import checked
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary, VocabularyRecord
from trainer.checkpoints import averages, metadata
from trainer.checkpoints.checkpoint import Checkpoints, chosen_steps
from trainer.config import CONFIG_FILE, Config, field_paths
from trainer.config.stored import load_vocabulary_record
from trainer.config.this_machine import on_this_machine
from trainer.data.cached_task import CachedTask
from trainer.data.run import Run
from trainer.data.task_record import warn_of_changes
from trainer.engine.program import Program
from trainer.setup import prepare


@dataclasses.dataclass(frozen=True)
class NoData:
    """The data of a run without a task or its caches; `lengths` are of the model's features."""

    lengths: Lengths
    tasks: tuple[CachedTask, ...] = ()
    vocabulary_sha256: str | None = None
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    record: dict[str, Any] = dataclasses.field(default_factory=dict)


def without_data(config: Config) -> Run:
    """Returns the run of a configuration that names no task."""
    lengths = Lengths(config.lengths.inputs or 0, config.lengths.targets or 0)
    return Run(config, cast(Any, NoData(lengths)), cast(Any, None))


def open_run(model_dir: str, cache_dir: str | None = None) -> Run:
    """Returns a run that is prepared for this machine.

    Its data is `NoData` if it has no task, or if its caches are gone and it has its vocabulary.
    """
    config, origins = metadata.load_config(model_dir)
    config = field_paths.replace(config, "model_dir", model_dir)
    if not config.task:
        return without_data(on_this_machine(config))
    if cache_dir:
        config = field_paths.replace(config, "cache_dir", cache_dir)
    try:
        run = prepare(on_this_machine(config), origins)
    except NoCache as error:
        if load_vocabulary_record(model_dir) is None:
            raise
        print(f"without its data: {error}", file=sys.stderr)
        return without_data(on_this_machine(config))
    warn_of_changes(model_dir, run.data.tasks_record)
    return run


def restore(
    run: Run, step: int | None, trained_with: Vocabulary, average: str | None = None
) -> tuple[int, Any]:
    """Returns a checkpoint's step and its parameters with LoRA merged; by default the newest's.

    `average` chooses averaged parameters: "last:K".
    """
    folder = run.config.model_dir
    checkpoints = Checkpoints(folder, writable=False)
    (chosen,) = chosen_steps("latest" if step is None else str(step), checkpoints.steps(), folder)
    check_vocabulary(checkpoints.path(chosen), trained_with)
    program = Program(run)
    params = program.merged(averages.parameters(checkpoints, chosen, program, average))
    checkpoints.close()
    return chosen, params


def vocabulary_of(run: Run, path: str | None) -> Vocabulary:
    """Returns the vocabulary at `path`, else the cache's or the one next to a run without data."""
    if isinstance(run.data, NoData):
        return _own_vocabulary(run, path)
    if path is None and run.data.tasks:
        return run.data.tasks[0].vocabulary
    if path is None:
        raise UserError(
            f"{run.config.task}: set --vocabulary; only caches of pipeline.build contain a "
            "vocabulary"
        )
    extra_ids = getattr(run.data, "extra_ids", 0)
    if run.data.tasks:
        extra_ids = run.data.tasks[0].manifest.plan.vocabulary.added_sentinels
    loaded = vocabulary.load(path, extra_ids)
    if loaded.size != run.data.vocab_size:
        raise UserError(
            f"--vocabulary={path} has {loaded.size} ids, but the model was trained on "
            f"{run.data.vocab_size}"
        )
    return loaded


def _own_vocabulary(run: Run, path: str | None) -> Vocabulary:
    """Returns the vocabulary at `path`, or the one in the folder of the run."""
    config = run.config
    extra_ids = config.vocabulary.extra_ids or 0
    if kept := load_vocabulary_record(config.model_dir):
        record = checked(VocabularyRecord, kept, files.join(config.model_dir, CONFIG_FILE))
        if path is None:
            return vocabulary.of_cache(config.model_dir, record, command="")
        extra_ids = record.added_sentinels
    if path is None:
        beside = (files.join(config.model_dir, name) for name in vocabulary.VOCABULARY_FILES)
        path = next(filter(files.exists, beside), None)
    if path is None:
        raise UserError(
            f"{config.model_dir} was converted without a vocabulary: set --vocabulary; if the "
            "vocabulary has fewer pieces than the model has ids, like T5's, convert again with "
            "--vocabulary and --extra_ids"
        )
    loaded = vocabulary.load(path, extra_ids)
    if loaded.size > config.model.vocab_size:
        raise UserError(
            f"--vocabulary={path} has {loaded.size} ids, but the model has "
            f"{config.model.vocab_size} embeddings"
        )
    return loaded


def check_vocabulary(checkpoint: str, loaded: Vocabulary) -> None:
    """Raises UserError if a checkpoint was trained with another vocabulary, if that is known."""
    trained_on = metadata.read(checkpoint).get("vocabulary_sha256")
    if trained_on not in (None, loaded.record.sha256):
        raise UserError(
            f"{checkpoint} was trained with a different vocabulary: name the right one with "
            "--vocabulary"
        )
