"""Evaluation of checkpoints by a suite of questions; they need neither a task nor its caches."""

import dataclasses

from tasks import registry
from tasks.annexes.questions import scores
from tasks.terminal.command_line import UserError
from trainer.annexes.suites.suite import Suite
from trainer.checkpoints import averages
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import averages as averages_config
from trainer.config import field_paths
from trainer.config.evaluation import EvaluateFlags
from trainer.engine import determinism, processes
from trainer.engine.program import Program
from trainer.evaluating.whole_splits import Results, recorded
from trainer.inference import trained_run

# Flags of evaluations of a split.
_OF_SPLITS = ("task", "metrics", "supervised", "plot")


def evaluate(flags: EvaluateFlags) -> dict[int, Results]:
    """Answers the suite with checkpoints, writes and prints the scores; returns results by step.

    The answers are written to MODEL_DIR/suite/STEP.jsonl. Raises UserError for an empty suite, for
    flags that belong to splits, and for what `trained_run` and `Suite` refuse.
    """
    suite = ",".join(flags.suite.suite)  # type: ignore[attr-defined]
    if not suite:
        raise UserError("--suite is empty: name sets, such as english,FILE.jsonl")
    for name in _OF_SPLITS:
        if getattr(flags, name) is not None:
            raise UserError(f"--{name} is for a split: leave it out with --suite, or --suite out")
    if flags.split != EvaluateFlags.split:
        raise UserError(f"--split={flags.split} has no effect with --suite: leave one of them out")
    if flags.task_module:
        registry.load(flags.task_module)
    run = trained_run.open_run(flags.model_dir, flags.cache_dir)
    values = {
        "suite.sets": suite,
        "evaluation.examples": flags.examples,
        "evaluation.batch_size": flags.batch_size,
    }
    given = {path: value for path, value in values.items() if value is not None}
    config = field_paths.replace_all(run.config, given)
    determinism.set_flags(config.deterministic)
    run = dataclasses.replace(run, config=config)
    checkpoints = Checkpoints(flags.model_dir, writable=False)
    steps = averages.steps_of(flags.steps, checkpoints, flags.model_dir, flags.average)
    vocabulary = None if run.config.data_scheme else trained_run.vocabulary_of(run, None)
    if vocabulary:
        trained_run.check_vocabulary(checkpoints.path(steps[0]), vocabulary)
    program = Program(run)
    asked = Suite(run, program, vocabulary)

    def of_step(step: int) -> Results:
        params = averages.parameters(checkpoints, step, program, flags.average)
        answered = asked(params)
        assert answered is not None
        name = f"{step}.{flags.average.replace(':', '')}" if flags.average else str(step)
        found = scores.of(answered)
        if processes.is_first():
            scores.write(scores.path(flags.model_dir, name), answered)
            print(f"step {step:,}\n{scores.shown(found)}")
        by_set = scores.results(found)
        if not flags.average:
            return by_set
        return {averages_config.label(each, flags.average): row for each, row in by_set.items()}

    results = recorded(flags, steps, None, of_step)
    checkpoints.close()
    return results
