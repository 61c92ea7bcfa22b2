"""Branches: `--branch_from=RUN@STEP` starts a run from the whole state of another's checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata
from trainer.checkpoints.checkpoint import Checkpoints, chosen_steps
from trainer.config import (
    CONFIG_FILE,
    Config,
    changes,
    field_paths,
    load_config,
    resuming,
    stored_config,
)
from trainer.config.stored import refuse_average
from trainer.data import task_record
from trainer.data.run import Run
from trainer.engine import processes
from trainer.engine.program import Program
from trainer.engine.step import TrainState
from trainer.engine.trainable import tuning_of
from trainer.optim.optimizer import in_places
from trainer.optim.schedule import learning_rate_schedule
from trainer.reporting import numbers

# A larger rise of the learning rate is said.
_RISE = 2
# Fields of the model that may change between two updates; others would compute another function.
_OF_MODEL = ("model.dropout_rate",)
# Fields that decide which arrays a state has; of those in _SET, only whether they have a value.
_OF_STATE = ("optimizer.name", "trainable")
_SET = ("plateau.metric",)


@dataclass(frozen=True)
class Branch:
    """The checkpoint of another run, checked but not read yet; `changes` are other settings."""

    folder: str
    step: int
    before: Config
    changes: list[str]
    rate_scale: float
    rates: tuple[float, float]  # of the last update and of the next

    def describe(self) -> str:
        """Returns a description of the beginning."""
        changed = f"; changed: {'; '.join(self.changes)}" if self.changes else ""
        low, high = (numbers.shown(rate, "{:.2g}") for rate in self.rates)
        rise = f"; the learning rate rises from {low} to {high}"
        return (
            f"branches from {self.folder} after update {self.step}, with its whole state{changed}"
            f"{rise if self.rates[1] > _RISE * self.rates[0] else ''}"
        )

    def state(self, program: Program) -> TrainState:
        """Reads the state onto the program's devices."""
        now = program.abstract_state()
        optimizer = tuning_of(self.before, program.spec).optimizer()
        then = in_places(jax.eval_shape(optimizer.init, now.params), now.opt_state)
        source = Checkpoints(self.folder, writable=False)
        state = source.restore(self.step, replace(now, opt_state=then))
        source.close()
        state = replace(state, opt_state=in_places(now.opt_state, state.opt_state))
        return program.with_rate_scale(state, self.rate_scale)


def start(run: Run, checkpoints: Checkpoints) -> Branch:
    """Opens `config.branch_from`; restores its evaluations and history into `checkpoints`.

    Raises a UserError, in all processes, if it has no such checkpoint or another model, or if the
    folder of the run holds another one.
    """
    config = run.config
    assert config.branch
    folder, step = config.branch
    with processes.failing_together():
        _check_folder(config)
        source = Checkpoints(folder, writable=False)
        try:
            chosen_steps(str(step), source.steps(), folder)
        except UserError as error:
            raise UserError(f"--branch_from={config.branch_from}: {error}") from error
        stored = metadata.read(source.path(step))
        source.close()
        refuse_average(stored["config"], folder)
        before = stored_config(stored["config"], folder)
        _check(run, before, stored, step)
    checkpoints.recall(step, stored, before, config)
    changed = checkpoints.history[-1]["changes"]
    changed += task_record.changes(stored, run.data.record, before.data.skips.batch(step))
    now = run.data.fingerprints
    changed += [
        f"the cache of {task} is another"
        for task, fingerprint in stored["cache_fingerprints"].items()
        if now.get(task, fingerprint) != fingerprint
    ]
    last, following = (learning_rate_schedule(each.optimizer) for each in (before, config))
    rates = float(last(step - 1)), float(following(step))
    return Branch(folder, step, before, changed, checkpoints.watch.rate_scale, rates)


def _check_folder(config: Config) -> None:
    if files.exists(files.join(config.model_dir, CONFIG_FILE)):
        other = load_config(config.model_dir)[0].branch_from
        if other != config.branch_from:
            raise UserError(
                f"--model_dir={config.model_dir} holds a run that did not branch from "
                f"{config.branch_from}: choose another folder"
            )


def _check(run: Run, before: Config, stored: Mapping[str, Any], step: int) -> None:
    config, flag = run.config, f"--branch_from={run.config.branch_from}"
    if step >= config.train_steps:
        raise UserError(
            f"{flag} has already made {step} updates, which count towards "
            f"--train_steps={config.train_steps}: raise it"
        )
    vocabulary = stored.get("vocabulary_sha256")
    if vocabulary and vocabulary != run.data.vocabulary_sha256:
        raise UserError(f"{flag} has another vocabulary than {config.task}: use --init_from")
    old = dict(field_paths.leaves(before))
    of_state = {*_OF_STATE, *_SET}
    for name in annexes.entries("tunings"):
        of_state |= {f"{name}.{field}" for field in getattr(config, name).OF_STATE}
    for path, value in field_paths.leaves(config):
        other = path.startswith("model.") and old.get(path) != value and path not in _OF_MODEL
        if other and changes(path) == "results":
            raise UserError(
                f"{flag}: {path} was {old.get(path)}, is {value}; a branch keeps its run's model: "
                "leave the flag out, or use --init_from"
            )
        differs = old.get(path) != value
        if path in _SET:
            differs = (old.get(path) is None) != (value is None)
        if differs and path in of_state:
            raise UserError(
                f"{flag}: {path} was {old.get(path)}, is {value}; a branch has its run's state: "
                "leave the flag out, or use --init_from"
            )
    if problems := resuming.skip_changes(before, config, step):
        raise UserError(f"{flag}: {problems[0]}")
