"""A trained run, opened to be used: its parameters on this machine, and its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    from tasks.vocabulary import Vocabulary
    from trainer.setup import Run


def open_run(model_dir: str, cache_dir: str | None = None) -> Run:
    """Returns the run in `model_dir`, prepared for this machine.

    Args:
      model_dir: folder of the run.
      cache_dir: folder of caches by task, if they were moved after training.

    Raises:
      UserError: there is no such run, or its cache is not there.
    """
    from trainer.config import fields, load_config
    from trainer.setup import on_this_machine, prepare, warn_of_changes

    config, origins = load_config(model_dir)
    config = fields.replace(config, "model_dir", model_dir)
    if cache_dir:
        config = fields.replace(config, "cache_dir", cache_dir)
    run = prepare(on_this_machine(config), origins)
    warn_of_changes(model_dir, run)
    return run


def restore(run: Run, step: int | None) -> tuple[int, Any]:
    """Returns the step and the parameters of a checkpoint, the newest if `step` is None.

    They are the model's own: LoRA's products are added to their kernels.
    """
    from trainer.checkpoint import Checkpoints, chosen_steps
    from trainer.engine.program import Program

    folder = run.config.model_dir
    checkpoints = Checkpoints(folder, writable=False)
    (chosen,) = chosen_steps("latest" if step is None else str(step), checkpoints.steps(), folder)
    program = Program(run)
    params = program.merged(checkpoints.restore(chosen, program.abstract_state()).params)
    checkpoints.close()
    return chosen, params


def vocabulary_of(run: Run, path: str | None) -> Vocabulary:
    """Returns the vocabulary at `path`, or the cache's; it must have as many ids as the run's."""
    from tasks import vocabulary
    from trainer.data.cached import CachedData

    extra_ids = 0
    if isinstance(run.data, CachedData):
        first = run.data.tasks[0]
        record = first.manifest.plan.vocabulary
        extra_ids = record.added_sentinels
        if path is None:
            return vocabulary.Vocabulary(first.ids.model, record, first.cache)
    elif path is None:
        raise UserError(
            f"{run.config.task}: give --vocabulary; only caches of pipeline.build contain the "
            "vocabulary"
        )
    loaded = vocabulary.load(path, extra_ids)
    if loaded.size != run.data.vocab_size:
        raise UserError(
            f"--vocabulary={path} has {loaded.size} ids, but the model was trained on "
            f"{run.data.vocab_size}"
        )
    return loaded
