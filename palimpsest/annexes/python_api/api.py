"""The commands as functions: from a list of texts to a model, with results as data frames.

A function takes the flags of its command as keyword arguments, with values of Python, such as
`lengths={"inputs": 128, "targets": 29}`, or the command's typed configuration object. It runs what
the command runs, in this process, and resumes, checks and prints as the command does.

A mistake that the command reports in one line raises `UserError` with that line. Ctrl-C, or the
stop button of a notebook, makes a training run save its state after the update at hand and raise
KeyboardInterrupt; the same call resumes. Elsewhere KeyboardInterrupt is raised at once. A run in a
thread other than the main one is not interrupted.
"""

import builtins
import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from palimpsest.annexes.python_api import documents
from palimpsest.annexes.python_api.frames import frame
from palimpsest.annexes.python_api.places import Place
from palimpsest.commands import COMMANDS, command
from tasks import annexes, vocabulary
from tasks.annexes.inspecting import show
from tasks.cache import cache, language_set
from tasks.document_kind import SIDES
from tasks.reading.corpus import CorpusSpec
from tasks.storage import files
from tasks.terminal import programs
from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError, nearest
from tasks.terminal.flags import flags_of
from tasks.terminal.texts import checked, shown
from trainer.config import Config, load_config

if TYPE_CHECKING:
    from pandas import DataFrame

    from pipeline.building.options import Options
    from trainer.config.decoding import TrainedFlags
    from trainer.config.evaluation import EvaluateFlags
    from trainer.inference.generator import Generator
    from vocab.train import Flags as TrainFlags

__all__ = [
    "Cache",
    "Model",
    "UserError",
    "Vocabulary",
    "build",
    "call",
    "finetune",
    "pretrain",
    "train_vocabulary",
    "write_corpus",
]

_EXIT_PREEMPTED = 75  # of trainer.engine.stopping, which imports JAX
StrPath = str | os.PathLike[str]


def write_corpus(
    texts: Iterable[str] | Iterable[tuple[str, str]] | Iterable[Mapping[str, str]],
    path: StrPath,
    validation: float = 0.01,
    overwrite: bool = False,
) -> str:
    """Returns the SPEC of a corpus of texts, for `corpus=`, after writing it as JSON lines.

    Texts may be pairs: tuples or lists of inputs and targets, or dicts with those keys. Of a data
    frame, pass frame["text"], or zip(frame["inputs"], frame["targets"]). `path` is local or remote;
    a file with other contents is replaced only with `overwrite`. `validation` is the share of texts
    that is held out, from 0 to less than 1. Raises UserError unless there are texts alone or pairs
    alone, or if the file has other contents.
    """
    place = Place(path).given
    share = documents.check_share(validation)
    documents.check_name(place)
    lines = documents.Lines(documents.several(texts, "texts"), place)
    documents.write(lines, place, overwrite)
    inputs, targets = SIDES if lines.pairs else ("", "")
    return str(CorpusSpec("json", place, inputs=inputs, targets=targets, validation=share))


def call(name: str, config: Any = None, /, **flags: Any) -> int:
    """Runs any command of `palimpsest --help` by its name, such as "cache report".

    Returns its exit code: 0, or another that the command explains, as 1 for faults that "verify"
    finds. Raises KeyboardInterrupt if Ctrl-C stopped it.
    """
    return _run(name, config, flags)[0]


def train_vocabulary(config: "TrainFlags | None" = None, /, **flags: Any) -> "Vocabulary":
    """Returns the vocabulary that `palimpsest vocab train` makes in the folder `output`.

    `config` is a `vocab.train.Flags`. A finished vocabulary is kept.
    """
    return Vocabulary(_run("vocab train", config, flags)[1].output)


def build(config: "Options | None" = None, /, **flags: Any) -> "Cache":
    """Returns the cache that `palimpsest build` writes, or the caches of several languages.

    `config` is a `pipeline.building.options.Options`. Worker processes do not run the caller's
    script. For `dry_run` and `part`, which leave no finished cache, use `call`.
    """
    options = _run("build", config, flags)[1]
    name = f"{options.name}_{options.task}" if options.name else options.task
    return Cache(options.cache_dir, name)


def pretrain(config: Config | None = None, /, **flags: Any) -> "Model":
    """Returns the model that `palimpsest pretrain` trains in the folder `model_dir`, or resumes.

    `config` is a `trainer.config.Config`. A group of flags may be a configuration object, too, such
    as `optimizer=OptimizerConfig(learning_rate=0.01)`: its fields that are not at their defaults
    count as given.
    """
    return _trained("pretrain", config, flags)


def finetune(**flags: Any) -> "Model":
    """Returns the model that `palimpsest finetune` makes of `init_from`; see `pretrain`."""
    return _trained("finetune", None, flags)


class Vocabulary:
    """A vocabulary in `folder`, which may also be a file or a name, as in the flag `vocabulary`."""

    def __init__(self, folder: StrPath):
        self._place = Place(folder)
        self._loaded = vocabulary.load(self._place.given)

    def __fspath__(self) -> str:
        return self.folder

    def __repr__(self) -> str:
        return f"Vocabulary({self._place.given!r})"

    @property
    def folder(self) -> str:
        """The vocabulary as given, or its absolute path once the current folder is another."""
        given = self._place.given
        is_name = self._loaded.name == given and not given.endswith((".model", ".json"))
        return given if is_name else os.fspath(self._place)

    def __len__(self) -> int:
        return self._loaded.size

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS; sentinels such as `<extra_id_0>` have theirs."""
        return vocabulary.encode_with_sentinels(self._loaded, checked(text, "text")).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; raises UserError for one that the vocabulary does not have."""
        found = np.atleast_1d(np.asarray(ids, object)).tolist()
        for each in found:
            try:
                known = 0 <= operator.index(each) < len(self)
            except TypeError:
                known = False
            if not known:
                size = f"it has {len(self)} ids, from 0 to {len(self) - 1}"
                raise UserError(f"{shown(each)} is no id of the vocabulary {self.folder}: {size}")
        return self._loaded.decode(np.asarray(found, np.int64))


class Cache:
    """The finished cache of `task` under `cache_dir`, or the caches of its languages."""

    def __init__(self, cache_dir: StrPath, task: str):
        self._place, self.task = Place(cache_dir), checked(task, "task")
        tasks = language_set.tasks_of(self.cache_dir, task, ()) or [task]
        self._opened = {
            each: cache.Cache.open(cache.find_cache(self.cache_dir, each)) for each in tasks
        }
        self._folders = [Place(opened.folder) for opened in self._opened.values()]

    def __fspath__(self) -> str:
        return self.cache_dir

    def __repr__(self) -> str:
        return f"Cache({self._place.given!r}, {self.task!r})"

    @property
    def cache_dir(self) -> str:
        """The folder as given, or its absolute path once Python's current folder is another."""
        return os.fspath(self._place)

    def counts(self) -> "DataFrame":
        """Returns documents, tokens, rows and bytes of text, as integers by task and split."""
        columns = ("documents", "tokens", "rows", "text_bytes")
        return frame(
            [
                {"task": task, "split": split}
                | {column: opened.manifest.total(split, column) for column in columns}
                for task, opened in self._opened.items()
                for split in opened.manifest.splits
            ],
            ["task", "split"],
        )

    def examples(self, count: int = 5, **flags: Any) -> "DataFrame":
        """Returns windows drawn from each cache, with the example that the task makes of each.

        Columns: task, documents (their ids), text, inputs and targets, as text with sentinels.
        Takes the flags of `palimpsest inspect`, such as `split`, `inputs`, `targets` and `index`.
        """
        from tasks.annexes.inspecting import inspect

        rows = []
        for folder in self._folders:
            main = command("tasks.annexes.inspecting.inspect")
            chosen = {} if "index" in flags else {"windows": count}
            typed = main.typed({"cache": folder, **chosen, **flags})
            task, samples, ids = main.call(typed, inspect.shown)
            rows += [{"task": task, **show.row(sample, ids)} for sample in samples]
        return frame(rows, ["example"])

    def verify(self, **flags: Any) -> None:
        """Checks every byte, as `palimpsest verify`; raises UserError if there is a fault."""
        for folder in self._folders:
            if call("verify", cache=folder, **flags):
                raise UserError(f"{os.fspath(folder)} has faults, which were printed")


class Model:
    """The run in the folder `model_dir`; its methods use the newest checkpoint, or `step`."""

    def __init__(self, model_dir: StrPath):
        self._place = Place(model_dir)
        self._generator: tuple[Any, Generator] | None = None
        self._caches = Place(self.config.cache_dir)  # raises UserError if there is no run

    def __fspath__(self) -> str:
        return self.model_dir

    def __repr__(self) -> str:
        return f"Model({self._place.given!r})"

    @property
    def model_dir(self) -> str:
        """The folder as given, or its absolute path once Python's current folder is another."""
        return os.fspath(self._place)

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return load_config(self.model_dir)[0]

    def metrics(self, split: str = "train") -> "DataFrame":
        """Returns what the run has logged for a split, by step: metrics, and speed for "train".

        Loss is in nats per target token. Raises UserError if nothing is logged for the split.
        """
        from trainer.reporting.metrics import read_metrics

        lines = read_metrics(self.model_dir)
        splits = sorted({line["split"] for line in lines})
        if split not in splits:
            known = ", ".join(splits) or "none yet"
            raise UserError(f"{self.model_dir} has no metrics of {split}: it has {known}")
        return frame(
            [
                {"step": line["step"], **line["metrics"], **line.get("speed", {})}
                for line in lines
                if line["split"] == split
            ],
            ["step"],
        )

    def evaluate(self, config: "EvaluateFlags | None" = None, /, **flags: Any) -> "DataFrame":
        """Returns the metrics of checkpoints on a whole split, by step and split.

        Takes the flags of `palimpsest evaluate`, such as `steps="all"`.
        """
        from trainer import evaluate

        main = command("trainer.evaluate")
        typed = _typed("evaluate", config, flags if config is not None else self._named(flags))
        found = main.call(typed, evaluate.evaluated)
        return frame(
            [
                {"step": step, "split": split, **values}
                for step, splits in found.items()
                for split, values in splits.items()
            ],
            ["step", "split"],
        )

    def fill(self, text: str, **flags: Any) -> str:
        """Returns a text with the model's words in its gaps, such as `<extra_id_0>`, in brackets.

        With `num_return_sequences` there are several, one per line. Takes the flags of
        `palimpsest fill`.
        """
        from trainer.annexes.suites import fill

        main = command("trainer.annexes.suites.fill")
        typed = main.typed(self._named({"text": checked(text, "text"), **flags}))
        return "\n".join(main.call(typed, lambda typed: list(fill.filled(typed, self._opened))))

    def generate(self, prompts: str | Iterable[str], **flags: Any) -> "DataFrame":
        """Returns a row per result: prompt, text, ids, score (log probability), ended (by EOS).

        Takes the flags of `palimpsest generate`, such as `max_new_tokens`.
        """
        from trainer.inference.prompts import results

        if of_files := {"input", "column", "output"} & flags.keys():
            raise UserError(
                f'{min(of_files)} is for files: use palimpsest.call("generate", …), or pass the '
                "prompts and keep the rows that are returned"
            )
        several = [prompts] if isinstance(prompts, str) else documents.several(prompts, "prompts")
        texts = [checked(each, f"prompt {number}") for number, each in enumerate(several, 1)]
        main = command("trainer.generate")
        typed = main.typed(self._named({"prompt": texts, **flags}))

        def generated(typed: Any) -> list[list[dict[str, Any]]]:
            return results(self._opened(typed), texts, 0, typed.decoding.num_return_sequences)

        found = zip(texts, main.call(typed, generated) if texts else [], strict=True)
        rows = [{"prompt": prompt, **each} for prompt, made in found for each in made]
        return frame(rows, columns=("prompt", "text", "ids", "score", "ended"))

    def examples(self, step: int, row: int | None = None) -> "DataFrame":
        """Returns the examples of the batch of update `step`, counted from 1, or of one row of it.

        Columns: documents (their ids), text, inputs and targets, as text with sentinels.
        """
        found = annexes.get("model", "examples")
        if found is None:
            raise UserError("examples needs the annex `comparing`, which this installation lacks")
        return frame(found(self._named({"step": step, "row": row})), ["example"])

    def export(self, output: StrPath, **flags: Any) -> str:
        """Returns the folder `output`, with the model for Hugging Face transformers.

        Takes the flags of `palimpsest export`. Raises UserError if transformers computes other
        results.
        """
        if call("export", **self._named({"output": output, **flags})):
            raise UserError(f"{self.model_dir}: transformers computes other results")
        return os.fspath(output)

    def _named(self, flags: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns flags with the folders of the run, and of its caches if their path has moved."""
        moved = self._caches.given and self._caches.moved
        caches = {"cache_dir": self._caches} if moved else {}
        return {"model_dir": self, **caches, **flags}

    def _opened(self, flags: "TrainedFlags") -> "Generator":
        """Returns the generator of the flags; the last one is kept, until there is a new step."""
        from trainer.inference import prompts

        decoding = flags.decoding  # type: ignore[attr-defined]
        steps = tuple(files.list_names(self.model_dir))
        key = (flags.step, flags.average, flags.vocabulary, flags.cache_dir, decoding, steps)
        if self._generator is None or self._generator[0] != key:
            self._generator = key, prompts.generator_of(flags, decoding)
        return self._generator[1]


def _run(name: str, config: Any, flags: Mapping[str, Any]) -> tuple[int, Any]:
    """Runs a command; returns (its exit code, its flags)."""
    if checked(name, "command") not in COMMANDS:
        raise UserError(f"unknown command {name}{nearest(name, COMMANDS)}")
    main, typed = command(COMMANDS[name]), _typed(name, config, flags)
    # In a notebook, a line that begins with "!" is a command.
    begin = "!palimpsest" if hasattr(builtins, "__IPYTHON__") else "palimpsest"
    with programs.named({module: f"{begin} {words}" for words, module in COMMANDS.items()}):
        code = main.call(typed) or 0
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code == _EXIT_PREEMPTED:  # its state is saved: this process ends as the command does
        sys.exit(code)
    return code, typed


def _typed(name: str, config: Any, flags: Mapping[str, Any]) -> Any:
    """Returns the flags of a command, unless it has a configuration object instead."""
    main = command(COMMANDS[name])
    corpus = flags.get("corpus")
    if not isinstance(corpus, (str, os.PathLike, CorpusSpec, list, tuple, type(None))):
        raise UserError(
            f"{name}: corpus is a SPEC, not {shown(corpus)}: write_corpus(texts, PATH) writes "
            'texts, such as frame["text"], and returns their SPEC'
        )
    if config is None:
        return main.typed(flags)
    kind = Config if name == "pretrain" else main.own_flags
    if not isinstance(config, (kind, main.own_flags)):
        first = max(flags_of(main.flags), key=lambda flag: flag.required).name
        place = "trainer.config" if kind is Config else kind.__module__
        meant = f"{first}=…, or a {place}.{kind.__name__}"
        raise UserError(f"{name}: give flags by name, such as {meant}, not {shown(config)}")
    if flags:
        raise UserError(f"{name}: give a configuration object or flags, not both")
    return config


def _trained(name: str, config: Config | None, flags: Mapping[str, Any]) -> "Model":
    if "corpus" in flags:
        given = f"corpus={shown(flags['corpus'])}"
        raise UserError(f"{name}: call palimpsest.build({given}, …) first, which makes the cache")
    if flags.get("print_config"):
        raise UserError(f'print_config makes no model: use palimpsest.call("{name}", …) for it')
    if "gin_file" in flags and "model_dir" not in flags:
        raise UserError("model_dir is missing: name it, even if the gin file does")
    typed = _run(name, config, flags)[1]
    return Model(typed.model_dir if isinstance(config, Config) else typed.run.values["model_dir"])
