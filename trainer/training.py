"""A training run, from its configuration to its end."""

import queue
import shlex
import threading

from tasks import annexes
from tasks.storage import files, retries
from tasks.terminal.programs import program
from trainer.config import Config, field_paths

# Remedies for a run that does not fit in memory, gentlest first.
_LESS_MEMORY = (
    "set --microbatches to divide the batch into parts with the same result, --model.remat=full to "
    "compute activations twice, a smaller --batch_size or another --preset"
)

# Commands that run a trained model, by architecture.
_USES = {"encoder_decoder": ("generate",), "decoder": ("generate",)}

# How long --print_config waits for a cache in a store, whose libraries may try for minutes.
_PATIENCE_SECONDS = 15.0


def start(config: Config, origins: dict[str, str], print_config: str | None = None) -> int:
    """Trains and returns the exit code, or prints the configuration's "values" or "words"."""
    if print_config:
        if config.cache_dir:
            config = _completed(config, origins)
        print(field_paths.describe(config, origins, words=print_config == "words"))
        return 0

    from trainer.monitoring.observed import observed

    with observed(config):
        return _run(config, origins)


def _run(config: Config, origins: dict[str, str]) -> int:
    from trainer.engine import determinism, hardware, processes
    from trainer.monitoring import activity
    from trainer.setup import prepare

    determinism.set_flags(config.deterministic)
    advice = _LESS_MEMORY + annexes.advice("memory")
    with processes.joined(config.processes), hardware.enough_memory(advice):
        with activity.doing(activity.STARTING, "opening the data"):
            run = prepare(config, origins, training=True)
            hardware.keep_freed_memory()

        if engine := annexes.get("training_engines", config.engine):
            from trainer.initialization import resume

            return engine(run, origins, resume.start)

        from trainer.loop import train

        code = train(run, origins)
        if not code and processes.is_first():
            print(_next(run.config))
        return code


def _next(config: Config) -> str:
    """Returns lines that name the folder of the finished model and what can be done with it."""
    folder = shlex.quote(config.model_dir)
    uses = [*_USES.get(config.model.architecture, ()), "evaluate", "export"]
    modules = [
        *annexes.entries(f"uses_runs.{config.model.architecture}").values(),
        *(f"trainer.{name}" for name in uses),
    ]
    others = ", ".join(program(module).removeprefix("python -m ") for module in modules)
    shows = [f"{program(entry)} {folder}" for entry in annexes.entries("shows_runs").values()]
    if not shows:
        return f"next, with --model_dir={folder}: {others}"
    return f"next: {shows[0]}\n      (or, with --model_dir={folder}: {others})"


def _completed(config: Config, origins: dict[str, str]) -> Config:
    """Returns `config` with the fields that its cache implies, unless its store does not answer."""
    from trainer.setup import prepare

    answers: queue.SimpleQueue[Config | BaseException] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(prepare(config, origins).config)
        except BaseException as error:
            answers.put(error)

    if files.is_remote(config.cache_dir):
        threading.Thread(target=ask, daemon=True).start()
    else:
        ask()
    answer: Config | BaseException
    try:
        answer = answers.get(timeout=_PATIENCE_SECONDS)
    except queue.Empty:
        answer = retries.Unreachable(f"no answer for {_PATIENCE_SECONDS:.0f} s")
    if isinstance(answer, retries.Unreachable):
        print(f"warning: nothing is taken from {config.cache_dir}: {answer.why}", flush=True)
        return config
    if isinstance(answer, BaseException):
        raise answer
    return answer
