"""Evaluates a run on tasks of lm-evaluation-harness.

    palimpsest harness --model_dir=DIR --tasks=NAME,NAME [--include_path=DIR] [--limit=N] \\
        [--output=FILE.json]

Prints the harness's table. Tasks are the harness's own, or those of YAML files in --include_path.
"""

import dataclasses
import json
import traceback
from typing import TYPE_CHECKING, Any

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.flag_fields import REQUIRED, above, at_least, field
from trainer.config.decoding import FORMS, TrainedFlags

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(TrainedFlags):
    """Flags of the command."""

    tasks: tuple[str, ...] = field(REQUIRED, "names of tasks, groups or tags; * matches any text")
    include_path: str | None = field(None, "folder of YAML files of tasks", metavar="DIR")
    form: str | None = field(
        None,
        "what a model that reads inputs predicts after a context: its targets (targets), or a gap "
        "at the context's end (span); None: as in the run's tasks",
        choices=FORMS,
    )
    num_fewshot: int | None = field(
        None, "examples before each question; None: the task's", rule=at_least(0)
    )
    limit: int | None = field(
        None, "examples per task, from its start; None: all of them", rule=above(0)
    )
    max_length: int | None = field(
        None,
        "longest row in tokens; longer contexts lose their start; None: as in training",
        rule=above(0),
    )
    gen_kwargs: str | None = field(
        None, "settings of generation, such as max_gen_toks=64, instead of the tasks'"
    )
    batch_size: int = field(32, "rows to score or decode together", rule=above(0))
    output: str | None = field(
        None, "JSON file for the results and each example's requests and answers", metavar="FILE"
    )


def run(flags: Flags) -> None:
    """Prints the table, and writes the output."""
    if flags.output and files.exists(flags.output):
        raise UserError(f"--output={flags.output} exists: name another file, or delete it")
    if flags.output and (folder := flags.output.rpartition("/")[0]):
        files.make_folder(folder)  # so that hours of evaluation cannot fail on it
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable, make_table

    from trainer.annexes.harness import model  # noqa: F401  registers the model

    place = (each.name for each in dataclasses.fields(TrainedFlags))
    names = (*place, "form", "max_length")
    manager = _manager(flags)
    try:
        results: Any = simple_evaluate(
            "palimpsest",
            {name: getattr(flags, name) for name in names},
            tasks=manager.match_tasks(list(flags.tasks)),
            num_fewshot=flags.num_fewshot,
            batch_size=flags.batch_size,
            limit=flags.limit,
            gen_kwargs=flags.gen_kwargs,
            log_samples=flags.output is not None,
            task_manager=manager,
        )
    except Exception as error:
        if isinstance(error, UserError) or _is_ours(error):
            raise
        # A task with an empty file raises an empty StopIteration.
        said = " ".join(f"{type(error).__name__} {error}".split())
        raise UserError(f"--tasks={','.join(flags.tasks)}: {said}") from error
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if flags.output:
        text = json.dumps(results, default=handle_non_serializable, ensure_ascii=False, indent=1)
        files.write_bytes(flags.output, text.encode())


def _is_ours(error: Exception) -> bool:
    """Returns whether this project's model raised an error, not the harness or its tasks."""
    names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "trainer.annexes.harness.model" in names


def _manager(flags: Flags) -> "TaskManager":
    """Returns the harness's tasks; raises UserError for names that are not among them."""
    from lm_eval.tasks import TaskManager

    if flags.include_path and not files.exists(flags.include_path):
        raise UserError(f"--include_path={flags.include_path}: no such folder")
    if flags.include_path:
        # The harness reads its own 14,000 files for 10 seconds; tasks of a folder need none.
        manager = TaskManager(include_path=flags.include_path, include_defaults=False)
        if set(flags.tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=flags.include_path)
    for name in flags.tasks:
        if not manager.match_tasks([name]):
            raise UserError(f"--tasks: no task {name}{nearest(name, manager.all_tasks)}")
    return manager


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
