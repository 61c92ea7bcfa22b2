"""Flags that flow between the stages of a recipe: corpora, folders, tasks and lengths."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from palimpsest.commands import COMMANDS
from tasks import registry
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.task import OBJECTIVES, objective_of
from tasks.terminal.command_line import UserError, nearest

Flags = dict[str, tuple[str, ...]]
# Keys that are no flags: which corpora a stage reads, and which of a kind's commands it is.
CORPORA, COMMAND = "corpora", "command"
OF_RECIPE = (CORPORA, COMMAND)
_WEIGHT = "weight"
_OF_CORPUS = ("corpus", "languages", _WEIGHT)
# Flags that decide where a stage's output is.
_PLACES = ("task", "name", "cache_dir", "model_dir", "output")
# Flags whose texts are SPECs; these end in templates, whose columns may have the names of stages.
_SPECS = ("corpus", "against")
# Stands for the folder of a recipe.
FOLDER = "{folder}"
_REFERENCE = re.compile(r"\{([a-z]+(?:\.[A-Za-z0-9_-]+)?)\}")


class Kind(NamedTuple):
    """A kind of stage: the command that it is, and others that it may be."""

    command: str
    others: tuple[str, ...] = ()

    @property
    def commands(self) -> tuple[str, ...]:
        return (self.command, *self.others)


# In the order in which they run, except that evaluations and exports follow what they read.
KINDS: Mapping[str, Kind] = {
    "dedup": Kind("dedup"),
    "vocabulary": Kind("vocab train", tuple({"vocab train_tokenizer"} & COMMANDS.keys())),
    "cache": Kind("build"),
    "pretrain": Kind("pretrain"),
    "finetune": Kind("finetune"),
    "evaluate": Kind("evaluate"),
    "report": Kind("report"),
    "export": Kind("export", tuple({"export_t5x"} & COMMANDS.keys())),
}
# Kinds whose stages always have a name, as in [cache.NAME], and those whose stages may have one.
NAMED = ("cache", "finetune")
MAY_BE_NAMED = _READS_MODEL = ("evaluate", "report", "export")
# Flags of commands that then do not make all that a stage makes.
PARTIAL = ("dry_run", "json", "part")
# Kinds whose stages read the corpora of the recipe.
READ_CORPORA = ("dedup", "vocabulary", "cache")
# Kinds whose stages train.
RUNS = ("pretrain", "finetune")
_MODEL = RUNS[0]


def order(names: Iterable[str]) -> list[str]:
    """Returns stages sorted by kind; stages of a fine-tuned model come right after its training."""
    names, kinds = list(names), list(KINDS)

    def rank(name: str) -> tuple[int, int, int]:
        kind, _, of = name.partition(".")
        trained = f"finetune.{of}"
        tuned = kind in ("finetune", *_READS_MODEL) and trained in names
        return (names.index(trained) if tuned else -1, kinds.index(kind), names.index(name))

    return sorted(names, key=rank)


@dataclasses.dataclass(frozen=True)
class Flowing:
    """The tables of a recipe: `folder` holds what its stages make; `given` is keys by stage."""

    folder: str
    corpora: Mapping[str, Mapping[str, Any]]
    given: Mapping[str, Mapping[str, Any]]

    def flags(
        self, name: str, typed: Flags, needs: list[str], within: tuple[str, ...] = ()
    ) -> Flags:
        """Returns a stage's flags: those that flow to it, and those `typed`, which win.

        Adds the names of the stages that it reads to `needs`. `within` are stages whose flags name
        this one.
        """
        if name in within:
            raise UserError(f"{{{name}}} refers to itself")
        kind, _, of = name.partition(".")
        flowing = getattr(self, f"_{kind}")(of, typed)
        found = {flag: texts for flag, texts in {**flowing, **typed}.items() if any(texts)}
        if kind in RUNS:
            read = [word.partition("=")[0] for word in found.get("task", ("",))[0].split(",")]
            makers = {task: self._makers(task) for task in read if task}
            needs += dict.fromkeys(f"cache.{each}" for found in makers.values() for each in found)
            keys = {key.replace("-", "_") for key in self.given[name]}
            elsewhere = keys & {"cache_dir", "task_module", "gin_file"}
            for task in makers if self._caches() and not elsewhere else ():
                if not makers[task] and task not in registry.tasks() and ":" not in task:
                    tasks = [self._task_of(cache) for cache in self._caches()]
                    raise UserError(
                        f"--task={task}: no [cache] makes it{nearest(task, tasks)}; they make "
                        f"{', '.join(tasks)}"
                    )
        inside = (*within, name)
        return {
            flag: tuple(self._filled(each, needs, inside, flag in _SPECS) for each in found[flag])
            for flag in found
        }

    def made_by(self, name: str, flags: Mapping[str, tuple[str, ...]]) -> str:
        """Returns the file or folder that a stage with these flags makes."""

        def one(flag: str) -> str:
            if flag not in flags:
                model = " or a [pretrain]" if flag == "model_dir" else ""
                raise UserError(f"it needs the key {flag}{model}")
            return flags[flag][0]

        kind = name.partition(".")[0]
        if kind == "cache":
            task = own_task(one("task"), flags.get("name", ("",))[0])
            return files.join(one("cache_dir"), task)
        if kind in RUNS or (kind == "evaluate" and "output" not in flags):
            within = ["evaluation.json"] * (kind == "evaluate")
            return files.join(one("model_dir"), *within)
        if kind in _READS_MODEL:
            one("model_dir")
        return one("output")

    def _filled(
        self, text: str, needs: list[str], within: tuple[str, ...], is_spec: bool = False
    ) -> str:
        """Returns a text with the outputs of the stages that it names; adds these to `needs`.

        The options of a SPEC, with its templates, stay.
        """
        text, mark, options = text.partition("?") if is_spec else (text, "", "")

        def output(found: re.Match[str]) -> str:
            name = found[1]
            if found[0] == FOLDER:
                return self.folder
            if name.partition(".")[0] not in KINDS:
                return found[0]  # {language}, or a column of a template
            if name not in self.given:
                raise UserError(f"{found[0]}: there is no stage {name}{nearest(name, self.given)}")
            needs.append(name)
            table = self.given[name]
            own: Flags = {key: (str(table[key]),) for key in _PLACES if key in table}
            return self.made_by(name, self.flags(name, own, [], within))

        return _REFERENCE.sub(output, text) + mark + options

    def _place(self, *parts: str) -> str:
        return files.join(self.folder, *parts)

    def _chosen(self, name: str) -> list[str]:
        """Returns the names of the corpora that a stage reads."""
        given = self.given[name].get(CORPORA, list(self.corpora))
        chosen = [given] if isinstance(given, str) else given
        if not _are_texts(chosen):
            raise UserError(f"{CORPORA}={chosen}: it must be a list of names of corpora")
        for each in chosen:
            if each not in self.corpora:
                raise UserError(f"{CORPORA}: there is no [corpus.{each}]")
            if chosen.count(each) > 1:
                raise UserError(f"{CORPORA}: {each} is there twice")
        return chosen

    def _specs(self, name: str, typed: Flags) -> Flags:
        """Returns --corpus and --languages of the corpora that a stage reads."""
        chosen = self._chosen(name)
        if "corpus" in typed or not chosen:
            return {}
        found: Flags = {"corpus": (), "languages": ()}
        for each in chosen:
            table = dict(self.corpora[each])
            spec, weight = table.pop("corpus", None), table.pop(_WEIGHT, 1)
            languages = table.pop("languages", [])
            specs = spec if isinstance(spec, list) else [spec]
            languages = [languages] if isinstance(languages, str) else languages
            is_number = type(weight) in (int, float) and 0 < weight < math.inf
            if not _are_texts(specs) or not _are_texts(languages) or not is_number or table:
                raise UserError(
                    f"[corpus.{each}] has the keys corpus (a SPEC), languages (texts) and "
                    f"{_WEIGHT} (a number above 0)"
                    + "".join(f"; unknown: {key}{nearest(key, _OF_CORPUS)}" for key in table)
                )
            if len(chosen) > 1 and (len(specs) > 1 or languages):
                raise UserError(
                    f"[corpus.{each}] has several SPECs or languages, but is not the only corpus: "
                    "give each a [corpus.NAME]"
                )
            found["corpus"] += tuple(specs) if len(chosen) == 1 else (f"{each}={specs[0]}",)
            found["languages"] = (",".join(languages),)
        return found

    def _dedup(self, of: str, typed: Flags) -> Flags:
        return {**self._specs("dedup", typed), "output": (self._place("duplicates"),)}

    def _vocabulary(self, of: str, typed: Flags) -> Flags:
        found = self._specs("vocabulary", typed)
        corpora = {each: self.corpora[each] for each in self._chosen("vocabulary")}
        weighted = any(_WEIGHT in each for each in corpora.values())
        if weighted and "alpha" in typed:
            raise UserError("alpha and the weights of corpora are alternatives: leave out one")
        if found and len(corpora) > 1 and weighted:
            weights = (f"{each}={table.get(_WEIGHT, 1)}" for each, table in corpora.items())
            found["weights"] = (",".join(weights),)
        return {**found, "output": (self._place("vocabulary"),)}

    def _cache(self, of: str, typed: Flags) -> Flags:
        found: Flags = self._specs(f"cache.{of}", typed)
        task = typed.get("task", ("",))[0]
        own = bool(found or "corpus" in typed) and task in OBJECTIVES
        if own:
            found["name"] = (of,)
        if "vocabulary" in self.given:
            found["vocabulary"] = ("{vocabulary}",)
        if "dedup" in self.given and found.get("corpus"):
            if "," in self.folder:
                raise UserError(
                    f"the folder {self.folder} has a comma, which divides exclude lists: choose "
                    "another --folder"
                )
            found["exclude"] = ("{dedup}/exclude.arrow",)
        name = typed.get("name", (of if own else "",))[0]
        if row_tokens := self._row_tokens(own_task(task, name), typed):
            found["row_tokens"] = (str(row_tokens),)
        return {"task": (task,), **found, "cache_dir": (self._place("cache"),)}

    def _row_tokens(self, task: str, typed: Flags) -> int | None:
        """Returns the window of the run that trains on a cache, if the recipe sets its lengths."""
        packs = self._keys(_MODEL, "data.pack_examples")[0] in (True, "true")
        kind = "data.example_" if packs else "lengths."
        lengths = self._keys(_MODEL, f"{kind}inputs", f"{kind}targets")
        if task not in self._tasks_of_run():
            return None
        return window_tokens(task, *lengths)

    def _keys(self, name: str, *keys: str) -> list[Any]:
        return [self.given.get(name, {}).get(key) for key in keys]

    def _task_of(self, of: str) -> str:
        """Returns the task of [cache.NAME]."""
        table = self.given[f"cache.{of}"]
        own = "corpus" in table or (self.corpora and table.get(CORPORA) != [])
        task = str(table.get("task", ""))
        default = of if own and task in OBJECTIVES else ""
        return own_task(task, str(table.get("name", default)))

    def _caches(self) -> list[str]:
        return [name.partition(".")[2] for name in self.given if name.startswith("cache.")]

    def _makers(self, task: str) -> list[str]:
        """Returns the caches of a task, or those that have a cache of it for a language."""
        tasks = {cache: self._task_of(cache) for cache in self._caches()}
        exact = [each for each in tasks if tasks[each] == task]
        ending = objective_of(task) or ""
        return exact or [
            each
            for each in tasks
            if ending
            and tasks[each].endswith(f"_{ending}")
            and task.startswith(tasks[each].removesuffix(ending))
            and self._has_languages(each)
        ]

    def _tasks_of_run(self) -> list[str]:
        """Returns the tasks that [pretrain] reads: its own, or those that no [finetune] reads."""
        if (own := self._keys(_MODEL, "task")[0]) is not None:
            return [word.partition("=")[0] for word in str(own).split(",")]
        tuned = {name.partition(".")[2] for name in self.given if name.startswith("finetune.")}
        return [self._task_of(cache) for cache in self._caches() if cache not in tuned]

    def _trained(self, tasks: list[str], folder: str) -> Flags:
        found: Flags = {"task": (",".join(tasks),)}
        if self._caches():
            found["cache_dir"] = (self._place("cache"),)
        return {**found, "model_dir": (self._place(folder),)}

    def _pretrain(self, of: str, typed: Flags) -> Flags:
        for name in self.given:
            if name.startswith("finetune."):
                self._check_cache_of(name)
        tasks = self._tasks_of_run()
        several = [cache for cache in self._caches() if self._has_languages(cache)]
        if "task" not in typed and len(tasks) > 1 and several:
            raise UserError(
                f"[cache.{several[0]}] has several languages, which are sampled as the only task: "
                "name the task in the key task"
            )
        return self._trained(tasks, "model")

    def _has_languages(self, of: str) -> bool:
        table = self.given[f"cache.{of}"]
        if "corpus" in table:
            return isinstance(table["corpus"], list) or "languages" in table
        chosen = self._chosen(f"cache.{of}")
        return len(chosen) > 1 or any("languages" in self.corpora[each] for each in chosen)

    def _check_cache_of(self, name: str) -> None:
        """Raises UserError if a [finetune.NAME] has no [cache.NAME] and no task."""
        of, caches = name.partition(".")[2], self._caches()
        if caches and of not in caches and not {"task", "gin_file"} & self.given[name].keys():
            raise UserError(
                f"[{name}] reads [cache.{of}], and there is none{nearest(of, caches)}: give both "
                f"tables one name, or [{name}] the key task (there are {', '.join(caches)})"
            )

    def _finetune(self, of: str, typed: Flags) -> Flags:
        self._check_cache_of(f"finetune.{of}")
        tasks = [self._task_of(of)] if of in self._caches() else []
        found = self._trained(tasks, f"finetune/{of}")
        if _MODEL in self.given:
            found["init_from"] = (f"{{{_MODEL}}}",)
        return found

    def _model(self, of: str) -> str:
        """Returns the model of a stage called NAME: of [finetune.NAME], else of [pretrain]."""
        name = f"finetune.{of}" if f"finetune.{of}" in self.given else _MODEL
        return f"{{{name}}}" if name in self.given else ""

    def _evaluate(self, of: str, typed: Flags) -> Flags:
        found: Flags = {"model_dir": (self._model(of),)}
        if of and f"finetune.{of}" not in self.given:  # beside [evaluate] of the same model
            found["output"] = (self._place("evaluations", f"{of}.json"),)
        return found

    def _report(self, of: str, typed: Flags) -> Flags:
        own = of and f"finetune.{of}" not in self.given
        page = f"report_{of}.html" if own else "report.html"
        model = self._model(of)
        place = typed.get("model_dir", (model,))[0]
        return {"model_dir": (model,), "output": (files.join(place, page) if place else "",)}

    def _export(self, of: str, typed: Flags) -> Flags:
        place = self._place("export", of or _MODEL)
        return {"model_dir": (self._model(of),), "output": (place,)}


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def own_task(task: str, name: str) -> str:
    """Returns the name of a task everywhere: NAME_OBJECTIVE for a corpus of one's own."""
    return f"{name}_{task}" if name else task


def window_tokens(task: str, inputs: Any, targets: Any) -> int | None:
    """Returns the tokens of a run's window; None if its lengths are the task's own, or wrong."""
    if not (inputs or targets) or not registry.find(task):
        return None
    found = registry.get(task)
    own = (found.lengths.inputs, found.lengths.targets)
    inputs, targets = (
        default if each is None else each
        for each, default in zip((inputs, targets), own, strict=True)
    )
    if not isinstance(inputs, int) or not isinstance(targets, int):
        return None  # the run refuses them
    return found.objective.window_tokens(Lengths(inputs, targets))
