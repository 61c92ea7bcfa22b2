"""The beginning of a run: initial parameters, its own newest checkpoint, or --init_from."""

import sys
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import CONFIG_FILE, Config, from_transformers
from trainer.data.run import Run
from trainer.engine import processes
from trainer.engine.damage import Damaged
from trainer.engine.program import Program
from trainer.engine.step import TrainState
from trainer.initialization import branch, rewind
from trainer.monitoring import activity
from trainer.optim import schedule
from trainer.reporting import numbers

# Files named of a folder that is not a run's.
_NAMES = 4


class Beginning(NamedTuple):
    """The beginning of a run: the number of updates made before, and a description."""

    step: int
    description: str


class Start(Protocol):
    """The beginning of a run without checkpoints of its own."""

    @property
    def step(self) -> int:
        """Number of updates made before."""

    def describe(self) -> str:
        """Returns a description, such as "starts from initial parameters"."""

    def state(self, program: Program) -> TrainState:
        """Returns the state, on the program's devices."""


def _resumed(step: int) -> Beginning:
    return Beginning(step, f"resumes from checkpoint {step}")


def _strangers(model_dir: str) -> str:
    """Returns words about what a folder without a run holds, or ""."""
    names = [name for name in files.list_names(model_dir) if not name.startswith(".")]
    if not names or CONFIG_FILE in names:
        return ""
    listed = ", ".join(names[:_NAMES]) + ", …" * (len(names) > _NAMES)
    return f" in a folder that already holds {listed}"


def _compared(run: Run) -> str:
    """Returns what checks of --init_from=hf: found, and whether it can be exported, or ""."""
    source = run.config.init_from or ""
    if run.config.branch or not from_transformers.is_folder(source):
        return ""
    # Imported here because it reads other programs' formats.
    from trainer.huggingface import configs

    why = configs.refusal(run.config.model, custom_code=True)
    no_export = f"; trainer.export cannot write this model: {why}" if why else ""
    with processes.failing_together():
        checks = annexes.every("folder_checks") if processes.is_first() else []
        return "".join(f"; {check(source)}" for check in checks) + no_export


def begin(
    run: Run, checkpoints: Checkpoints, program: Program
) -> tuple[Beginning, TrainState | None]:
    """Returns the run's beginning, and its state or None if training is finished.

    A run with checkpoints resumes from its newest. If that is damaged, `checkpoint.on_damage` says
    whether to set it aside and use an older one. Training is not finished while the evaluation of
    the last update is due. Raises a UserError for damage or different settings; see also `start`.
    """
    beginning, state = _begin(run, checkpoints, program)
    if state is not None:
        added = run.config.entries("batch_features")
        program.features = [features(run, program) for features in added]
        activity.begun(beginning.step, bool(checkpoints.steps()), beginning.description)
    return beginning, state


def _begin(
    run: Run, checkpoints: Checkpoints, program: Program
) -> tuple[Beginning, TrainState | None]:
    steps = checkpoints.steps()
    processes.check_equal(f"checkpoints in {run.config.model_dir}", " ".join(map(str, steps)))
    target = rewind.target(run, checkpoints)
    if not steps:
        first = start(run, checkpoints)
        description = first.describe() + _strangers(run.config.model_dir) + _compared(run)
        return Beginning(first.step, description), first.state(program)
    newest = steps[-1] if target is None else target
    try:
        _check_rate(checkpoints.check_resumable(newest, run), run.config)
        # Read even if training is finished: its checkpoint may not be read again soon.
        state = checkpoints.restore(newest, program.abstract_state())
        if target is not None:
            rewind.set_aside(run.config, checkpoints, target)
        over = newest >= run.config.train_steps or checkpoints.watch.exhausted
        finished = over and (checkpoints.evaluated or not run.config.evaluation.every_steps)
        # The evaluation that lowered the rate may have come after the checkpoint.
        state = program.with_rate_scale(state, checkpoints.watch.rate_scale)
        return _resumed(newest), None if finished else state
    except Damaged as error:
        if target is not None:
            raise
        sound = checkpoints.newest_sound(newest, run, program.abstract_state())
        return _fall_back(run, checkpoints, program, error, sound)


def _check_rate(before: Config, now: Config) -> None:
    """Raises UserError if more updates than before bring a higher rate, and nobody has agreed."""
    if now.rate_may_rise or schedule.rise(now.optimizer, 2, before.train_steps):  # in cycles
        return
    update = schedule.rise(now.optimizer, before.train_steps, now.train_steps)
    if update is None:
        return
    rate = schedule.learning_rate_schedule(now.optimizer)
    low, high = (numbers.shown(float(rate(step)), "{:.2g}") for step in (update - 2, update - 1))
    raise UserError(
        f"--train_steps={now.train_steps}: the run was planned for {before.train_steps:,} updates, "
        f"and its schedule raises the learning rate from {low} to {high} at update {update:,}, "
        "which undoes what low rates had gained. Train from the start in another --model_dir with "
        "a longer schedule (a cosine's --optimizer.steps_per_cycle), or agree with --rate_may_rise"
    )


def _fall_back(
    run: Run, checkpoints: Checkpoints, program: Program, damage: Damaged, sound: int | None
) -> tuple[Beginning, TrainState]:
    """Sets damaged checkpoints aside and returns the newest sound one."""
    said = f"checkpoint {damage.path} is damaged ({damage.reason})"
    if sound is None:
        raise UserError(
            f"{said}, and there is no sound one before it: restore a copy of a checkpoint, or "
            "start again in another --model_dir"
        ) from damage
    if run.config.checkpoint.on_damage == "stop":
        raise UserError(
            f"{said}: the newest sound one is checkpoint_{sound}; run with "
            "--checkpoint.on_damage=fall_back to resume from it"
        ) from damage
    moved = checkpoints.set_aside(sound)
    renamed = f"{said}: renamed to {' and '.join(moved)}; resuming from checkpoint_{sound}"
    if processes.is_first():
        print(renamed, file=sys.stderr)
    activity.tell(activity.CHECKPOINT_FAILED, renamed, sound)
    checkpoints.check_resumable(sound, run)
    state = checkpoints.restore(sound, program.abstract_state())
    return _resumed(sound), program.with_rate_scale(state, checkpoints.watch.rate_scale)


def start(run: Run, checkpoints: Checkpoints | None = None) -> Start:
    """Returns the beginning of a run without checkpoints.

    That is --init_from, initial parameters or, if the run has a place for `checkpoints`,
    --branch_from.
    """
    if checkpoints and run.config.branch:
        return branch.start(run, checkpoints)
    if not run.config.init_from:
        return _Fresh()
    # Imported here because it reads other programs' formats.
    from trainer.initialization import init_from

    return init_from.start(run)


@dataclass(frozen=True)
class _Fresh:
    step: int = 0

    def describe(self) -> str:
        return "starts from initial parameters"

    def state(self, program: Program) -> TrainState:
        return program.initial_state()
