"""The commands as functions: from a list of texts to a model, with results as data frames.

A function takes the flags of its command as keyword arguments, with values of Python, such as
`lengths={"inputs": 128, "targets": 29}`, or the command's typed configuration object. It runs what
the command runs, in this process, and resumes, checks and prints as the command does.

A mistake that the command reports in one line raises `UserError` with that line. Ctrl-C, or the
stop button of a notebook, makes a training run save its state after the update at hand and raise
KeyboardInterrupt; the same call resumes. Elsewhere KeyboardInterrupt is raised at once. A run in a
thread other than the main one is not interrupted.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from palimpsest.commands import COMMANDS, command
from tasks import vocabulary
from tasks.cache import cache, language_set
from tasks.inspection import decode
from tasks.reading.corpus import CorpusSpec
from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError, nearest
from tasks.vocabulary import TokenIds
from trainer.config import Config, load_config

if TYPE_CHECKING:
    from pandas import DataFrame

    from pipeline.building.options import Options
    from tasks.inspection.show import Sample
    from trainer.config.decoding import TrainedFlags
    from trainer.config.evaluation import EvaluateFlags
    from trainer.trained.generator import Generator
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
_PAIR = ("inputs", "targets")
StrPath = str | os.PathLike[str]


def write_corpus(
    texts: Iterable[str] | Iterable[tuple[str, str]] | Iterable[Mapping[str, str]],
    path: StrPath,
    validation: float = 0.01,
) -> str:
    """Returns the SPEC of a corpus of texts, for `corpus=`, after writing it as JSON lines.

    Texts may be pairs: tuples of inputs and targets, or dicts with those keys. `path` is local or
    remote, and a file there is replaced. `validation` is the share of texts that is held out, from
    0 to 1. Raises UserError unless there are texts alone or pairs alone.
    """
    kinds, place = set[tuple[str, ...]](), os.fspath(path)
    with files.atomic_write(place) as file:
        for each in texts:
            row: Mapping[str, str]
            if isinstance(each, str):
                row = {"text": each}
            else:
                row = dict(zip(_PAIR, each, strict=True)) if isinstance(each, tuple) else each
            kinds.add(tuple(sorted(row.keys() & {"text", *_PAIR})))
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
        if kinds not in ({("text",)}, {_PAIR}):
            raise UserError(f"{place}: give texts alone, or pairs of inputs and targets alone")
    inputs, targets = _PAIR if kinds == {_PAIR} else ("", "")
    share = float(validation)
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
    """Returns the cache that `palimpsest build` writes, or those of several languages.

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
        self.folder = os.fspath(folder)
        self._loaded = vocabulary.load(self.folder)

    def __fspath__(self) -> str:
        return self.folder

    def __repr__(self) -> str:
        return f"Vocabulary({self.folder!r})"

    def __len__(self) -> int:
        return self._loaded.size

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS; sentinels such as `<extra_id_0>` have theirs."""
        return vocabulary.encode_with_sentinels(self._loaded, text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return self._loaded.decode(np.asarray(ids, np.int64))


class Cache:
    """The finished cache of `task` under `cache_dir`, or the caches of its languages."""

    def __init__(self, cache_dir: StrPath, task: str):
        self.cache_dir, self.task = os.fspath(cache_dir), task
        tasks = language_set.tasks_of(self.cache_dir, task, ()) or [task]
        self._opened = {
            each: cache.Cache.open(cache.find_cache(self.cache_dir, each)) for each in tasks
        }

    def __fspath__(self) -> str:
        return self.cache_dir

    def __repr__(self) -> str:
        return f"Cache({self.cache_dir!r}, {self.task!r})"

    def counts(self) -> "DataFrame":
        """Returns documents, tokens, rows and bytes of text, as integers by task and split."""
        columns = ("documents", "tokens", "rows", "text_bytes")
        return _frame(
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

        Columns: task, documents (their ids), text, inputs and targets, as text with sentinels. The
        flags are those of `palimpsest inspect`, such as `split`, `inputs`, `targets` and `index`.
        """
        from pipeline import inspect

        rows = []
        for opened in self._opened.values():
            main = command("pipeline.inspect")
            chosen = {} if "index" in flags else {"windows": count}
            typed = main.typed({"cache": opened.folder, **chosen, **flags})
            task, samples, ids = main.call(typed, inspect.shown)
            rows += [{"task": task, **_example(sample, ids)} for sample in samples]
        return _frame(rows, ["example"])

    def verify(self, **flags: Any) -> None:
        """Checks every byte, as `palimpsest verify`; raises UserError if there is a fault."""
        for opened in self._opened.values():
            if call("verify", cache=opened.folder, **flags):
                raise UserError(f"{opened.folder} has faults, which were printed")


class Model:
    """The run in the folder `model_dir`; its methods use the newest checkpoint, or `step`."""

    def __init__(self, model_dir: StrPath):
        self.model_dir = os.fspath(model_dir)
        self._generator: tuple[Any, Generator] | None = None
        load_config(self.model_dir)  # raises UserError if there is no run

    def __fspath__(self) -> str:
        return self.model_dir

    def __repr__(self) -> str:
        return f"Model({self.model_dir!r})"

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
        return _frame(
            [
                {"step": line["step"], **line["metrics"], **line.get("speed", {})}
                for line in lines
                if line["split"] == split
            ],
            ["step"],
        )

    def evaluate(self, config: "EvaluateFlags | None" = None, /, **flags: Any) -> "DataFrame":
        """Returns the metrics of checkpoints on a whole split, by step and split.

        The flags are those of `palimpsest evaluate`, such as `steps="all"`.
        """
        from trainer import evaluate

        main = command("trainer.evaluate")
        found = main.call(config or main.typed({"model_dir": self, **flags}), evaluate.evaluated)
        return _frame(
            [
                {"step": step, "split": split, **values}
                for step, splits in found.items()
                for split, values in splits.items()
            ],
            ["step", "split"],
        )

    def fill(self, text: str, **flags: Any) -> str:
        """Returns a text with the model's words in its gaps, such as `<extra_id_0>`, in brackets.

        With `num_return_sequences` there are several, one per line. The flags are those of
        `palimpsest fill`.
        """
        from trainer import fill

        main = command("trainer.fill")
        typed = main.typed({"model_dir": self, "text": text, **flags})
        return "\n".join(main.call(typed, lambda typed: list(fill.filled(typed, self._opened))))

    def generate(self, prompts: str | Sequence[str], **flags: Any) -> "DataFrame":
        """Returns a row per result: prompt, text, ids, score (log probability), ended (by EOS).

        The flags are those of `palimpsest generate`, such as `max_new_tokens`.
        """
        from trainer.trained.prompts import results

        main, prompts = (
            command("trainer.generate"),
            [prompts] if isinstance(prompts, str) else prompts,
        )
        typed = main.typed({"model_dir": self, "prompt": list(prompts), **flags})

        def generated(typed: Any) -> list[list[dict[str, Any]]]:
            return results(self._opened(typed), prompts, 0, typed.decoding.num_return_sequences)

        found = zip(prompts, main.call(typed, generated), strict=True)
        return _frame([{"prompt": prompt, **each} for prompt, made in found for each in made])

    def examples(self, step: int, row: int | None = None) -> "DataFrame":
        """Returns the examples of a batch, that of the update `step`, from 1; or those of one row.

        Columns: documents (their ids), text, inputs and targets, as text with sentinels.
        """
        from trainer.comparing.explanation import Explanation

        def explained(typed: Any) -> list[dict[str, str]]:
            found = Explanation(typed.model_dir, typed.step, typed.cache_dir)
            places = found.examples_of(typed.row)
            return [_example(found.sample(*place), found.ids) for place in places]

        main = command("trainer.explain")
        typed = main.typed({"model_dir": self, "step": step, "row": row})
        return _frame(main.call(typed, explained), ["example"])

    def export(self, output: StrPath, **flags: Any) -> str:
        """Returns the folder `output`, with the model for Hugging Face transformers.

        The flags are those of `palimpsest export`. Raises UserError if transformers computes other
        results.
        """
        if call("export", model_dir=self, output=output, **flags):
            raise UserError(f"{self.model_dir}: transformers computes other results")
        return os.fspath(output)

    def _opened(self, flags: "TrainedFlags") -> "Generator":
        """Returns the generator of the flags; the last one is kept, until there is a new step."""
        from trainer.trained import prompts

        decoding = flags.decoding  # type: ignore[attr-defined]
        steps = tuple(files.list_names(self.model_dir))
        key = (flags.step, flags.vocabulary, flags.cache_dir, decoding, steps)
        if self._generator is None or self._generator[0] != key:
            self._generator = key, prompts.generator_of(flags, decoding)
        return self._generator[1]


def _run(name: str, config: Any, flags: Mapping[str, Any]) -> tuple[int, Any]:
    """Runs a command; returns (its exit code, its flags)."""
    if name not in COMMANDS:
        raise UserError(f"unknown command {name}{nearest(name, COMMANDS)}")
    if config is not None and flags:
        raise UserError(f"{name}: give a configuration object or flags, not both")
    main = command(COMMANDS[name])
    typed = main.typed(flags) if config is None else config
    code = main.call(typed) or 0
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code == _EXIT_PREEMPTED:  # its state is saved: this process ends as the command does
        sys.exit(code)
    return code, typed


def _trained(name: str, config: Config | None, flags: Mapping[str, Any]) -> "Model":
    if "gin_file" in flags and "model_dir" not in flags:
        raise UserError("model_dir is missing: name it, even if the gin file does")
    typed = _run(name, config, flags)[1]
    return Model(typed.model_dir if config else typed.run.values["model_dir"])


def _example(sample: "Sample", ids: TokenIds) -> dict[str, str]:
    """Returns a row of a data frame of examples."""
    sides = {"text": sample.tokens}
    if sample.trace:
        sides |= {"inputs": sample.trace.inputs.tokens_L} if sample.trace.inputs else {}
        sides |= {"targets": sample.trace.targets.tokens_L}
    return {
        "example": sample.title,
        "documents": ", ".join(part.id for part in sample.parts),
        **{side: decode.spelled(tokens.tolist(), ids) for side, tokens in sides.items()},
    }


def _frame(rows: Sequence[Mapping[str, Any]], index: Sequence[str] = ()) -> "DataFrame":
    with extras.needed("a data frame", "pipeline"):
        from pandas import DataFrame
    frame = DataFrame(rows)
    return frame.set_index([*index]) if index and rows else frame
