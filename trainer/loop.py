"""The training loop: wait, batch, update, report, evaluate, save."""

import contextlib
from collections.abc import Callable, Iterator

from tasks.storage import files, lock
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.early_stopping import Watch, flattened
from trainer.config import save_config
from trainer.data.run import Run, Waiting
from trainer.engine import processes
from trainer.engine.compiled_programs import check_options
from trainer.engine.in_flight import InFlight
from trainer.engine.program import Program
from trainer.engine.step import TrainState
from trainer.engine.stopping import Stop
from trainer.evaluating.evaluation import Evaluation
from trainer.initialization.resume import Beginning, begin
from trainer.monitoring import activity
from trainer.reporting.metrics import MetricsWriter
from trainer.reporting.profile import Profile
from trainer.reporting.reports import Reports, due
from trainer.reporting.software import save_software
from trainer.reporting.startup import startup_text


def train(run: Run, origins: dict[str, str]) -> int:
    """Trains up to `config.train_steps`, from the newest checkpoint if there is one.

    Returns the exit code: 0 when finished; with the state saved, EXIT_PREEMPTED after SIGTERM and
    EXIT_INTERRUPTED after Ctrl-C.
    """
    config = run.config
    with _locked(config.model_dir) as check_lock, contextlib.closing(run.data):
        processes.check_shared(config.model_dir)
        watch = Watch(config.checkpoint, config.stopping, config.plateau, config.task_module)
        checkpoints = Checkpoints(config.model_dir, config.checkpoint, watch=watch)
        program = Program(run)
        check_options(program.mesh, config.compiler_options)
        beginning, state = begin(run, checkpoints, program)
        if state is not None:
            return _train(run, origins, program, checkpoints, beginning, state, check_lock)
        early = f", early: {watch.why_exhausted}" if watch.exhausted else ""
        print(
            f"training is finished{early}: checkpoint of step {beginning.step} in "
            f"{config.model_dir}"
        )
        checkpoints.close()
        return 0


@contextlib.contextmanager
def _locked(model_dir: str) -> Iterator[Callable[[], None]]:
    """Locks model_dir for all processes of a run; yields a function that checks the lock."""
    if not processes.is_first():
        yield lambda: None
        return
    files.make_folder(model_dir)
    with lock.held(model_dir, "run", "--model_dir") as held:
        yield held.check


def _train(
    run: Run,
    origins: dict[str, str],
    program: Program,
    checkpoints: Checkpoints,
    beginning: Beginning,
    state: TrainState,
    check_lock: Callable[[], None],
) -> int:
    config, step, last = run.config, beginning.step, run.config.train_steps
    stop = Stop()
    waiting = Waiting(stop.received_alone)
    unevaluated = bool(config.evaluation.every_steps) and not checkpoints.evaluated
    writer = MetricsWriter(
        config, step, processes.is_first(), not unevaluated, checkpoints.metrics_digest
    )
    reports = Reports(run, program, checkpoints, writer, waiting)
    # Before the folder has a configuration, since this can refuse its suite.
    evaluate = _Evaluate(run, program, checkpoints.watch, reports, stop, unevaluated)
    if processes.is_first():
        kept = run.data.keep_vocabulary(config.model_dir)
        save_config(config, origins, {**run.data.record, **kept, **checkpoints.record})
        changes = save_software(config.model_dir)
        print(startup_text(run, origins, program, step, beginning.description, changes), flush=True)
    batches = run.data.training(step, *program.host_part, waiting=waiting)
    in_flight = InFlight()

    def save(step: int, state: TrainState) -> None:
        reports.settle(step, state)
        with reports.speed.blocking.timed():
            # Metrics come first: a checkpoint implies that its steps' metrics are written.
            writer.flush()
            check_lock()
            checkpoints.save(step, state, run, not evaluate.owed, writer.digest(step))

    shown = progress.shown("training", last, step)
    with stop, Profile(config) as profile, shown as bar, activity.doing(activity.STEPPING):
        if evaluate.owed:
            # SIGTERM ended the run after it saved this step but before it evaluated it.
            state = evaluate(step, state)
            if not (evaluate.owed or stop.error):
                checkpoints.record_evaluation(step)
        while step < last and not stop:
            with profile.update(step + 1):
                rows = stop.agreed(lambda: next(batches, None))
                if rows is None:
                    break
                batch = program.put(rows)
                reports.before(step + 1, state, batch)
                state = program.train_step(state, batch)
            step += 1
            in_flight.add(state)
            activity.advanced(step)
            profile.after(step, state)
            state = reports.after(step, state)
            stop.asked()
            if due(step, config.evaluation.every_steps, last):
                state = evaluate(step, state)
            if checkpoints.watch.is_best(step) or due(step, config.checkpoint.every_steps, last):
                save(step, state)
            bar.update(step - 1, reports.note)  # the last may not be finished
        if step not in (0, *checkpoints.steps()):
            save(step, state)
        bar.update(step, reports.note)
    checkpoints.close()
    writer.close()
    return stop.exit_code(step, complete=step == last and not evaluate.owed)


class _Evaluate:
    """Evaluates states on the validation split; `owed` is True until the newest is evaluated."""

    def __init__(
        self, run: Run, program: Program, watch: Watch, reports: Reports, stop: Stop, owed: bool
    ):
        self._program, self._watch, self._reports = program, watch, reports
        self._stop, self.owed = stop, owed
        self._evaluation = (
            Evaluation(run, "validation", program) if run.config.evaluation.every_steps else None
        )

    def __call__(self, step: int, state: TrainState) -> TrainState:
        """Evaluates the state after `step`, unless stopping; returns the state to continue with."""
        evaluation, stop, watch = self._evaluation, self._stop, self._watch
        assert evaluation is not None
        self._reports.settle(step, state)
        # An evaluation may take longer than the time between SIGTERM and SIGKILL.
        results = None
        if not stop:
            with activity.doing(activity.EVALUATING, f"evaluating after update {step}"):
                results = stop.agreed(lambda: evaluation(state.params, step, stop.asked))
        self.owed = results is None
        if results is not None:
            self._reports.evaluations(step, results)
            try:
                if watch.see(step, flattened(results)):
                    activity.tell(activity.BEST, watch.described, step)
            except UserError as error:
                # No task has the metric: the run ends after saving its updates.
                stop.error = error
            if watch.exhausted:
                stop.early = watch.why_exhausted
            state = self._program.with_rate_scale(state, watch.rate_scale)
        self._reports.speed.restart(step)
        return state
