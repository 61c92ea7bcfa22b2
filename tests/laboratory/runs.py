"""Random runs, or a given one: batches against the cache, killed and resumed, damaged, refused.

A random run is of a small model, in forks. A given one runs in fresh processes, which are killed
while they start, make updates, evaluate or write a checkpoint.
"""

import argparse
import collections
import functools
import importlib
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from tasks import annexes
from tasks.terminal.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR
from tests.laboratory.commands import (
    DEADLINE_SECONDS,
    EXIT_PREEMPTED,
    Command,
    Difference,
    Done,
    draw_kills,
    draw_signal,
    in_fork,
    stop_before_kill,
)
from tests.laboratory.comparing import checkpoints, metrics_of, run_differences
from tests.support import in_process, small_tokenizers
from tests.support.damage import DAMAGES, any_file, damage
from tests.support.plain_records import read_rows
from tests.support.spans import rebuilt
from tests.support.words import changed
from trainer.config.optimizer import OPTIMIZERS

_MODULE = "trainer.pretrain"
# Modules that runs import, so that forks need not.
_MODULES = (
    *("trainer.pretrain", "trainer.training", "trainer.loop", "trainer.setup", "trainer.evaluate"),
    *("trainer.checkpoints.checkpoint", "trainer.reporting.metrics", "trainer.data.cached"),
    *("trainer.engine.program", "tensorstore"),
    *("trainer.export", "trainer.evaluating.evaluation", "orbax.checkpoint", "optax", "flax.linen"),
)
_SENTINELS = 100
_MODELS = {
    "t5_1_1_tiny": (*["span_corruption"] * 2, "prefix_lm", "ul2", "supervised", "deshuffling"),
    "lm_tiny": ("lm", "decoder_prefix_lm", "prefix_lm", "span_corruption", "full_lm"),
    "llama_tiny": ("lm", "full_lm"),
    "bert_tiny": ("masked_lm",),
}
# Rows of these do not give their windows back.
_NOT_UNDONE = ("ul2", "deshuffling", "masked_lm", "supervised")
_STACKS = {
    "encoder": ("t5_1_1_tiny", "bert_tiny"),
    "decoder": ("t5_1_1_tiny", "lm_tiny", "llama_tiny"),
}
_OPTIMIZERS = [
    each for each in ("adafactor", "adamw", "lion", "muon", "adamw_rms") if each in OPTIMIZERS
]
_FLAGS = {
    "model.dropout_rate": (0, 0, 0.1), "model.dtype": ("float32", "float32", "bfloat16"),
    "model.scan_layers": ("false", "true"), "model.remat": ("none", "full"),
    "optimizer.name": _OPTIMIZERS,
    "optimizer.schedule": ("constant", "constant * linear_warmup * cosine_decay"),
    "microbatches": (1, 1, 2), "data.shuffle": ("global", "global", "block", "none"),
    "data.threads": (1, 2), "data.prefetch": (1, 4), "checkpoint.every_steps": (1, 2, 3, 0),
    "checkpoint.keep": (1, 3, "None"), "evaluation.every_steps": (0, 2, 3),
    "metrics.norms_every_steps": (0, 0, 3), "on_nan": ("stop", "skip"), "seed": (0, 1, 2**31),
    "loss.normalizer": ("sum", "num_real_target_tokens"),
}  # fmt: skip


# Settings of a given run besides its flags: short rows, dropout, every kind of output.
_GIVEN = {
    "batch_size": 4, "lengths.inputs": 64, "lengths.targets": 18, "model.dropout_rate": 0.1,
    "metrics.every_steps": 1, "checkpoint.best_metric": "loss",
}  # fmt: skip
# Phases that kills of a given run are aimed at, with their weights. A kill may still land in
# another phase; the table shows the actual one.
_PHASE_WEIGHTS = {"start": 2, "update": 4, "evaluation": 2, "checkpoint": 2}
# A flipped bit is twice as likely as each other damage.
_DAMAGES = [*DAMAGES, "bit"]
# A task module that redefines a task, with windows of one token less.
_EDITED_MODULE = "edited_task_of_laboratory"
_EDITED_TASK = """
import dataclasses

from tasks import registry

task = registry.get(%r)
objective = task.objective


class Edited(type(objective)):
    def window_tokens(self, lengths):
        return super().window_tokens(lengths) - 1


settings = {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective)}
TASKS = (dataclasses.replace(task, objective=Edited(**settings)),)
"""


class Run(Command):
    """A run in a model directory, and what it is doing, judged by its files."""

    exit_codes = Command.exit_codes | {
        signal.SIGINT: (0, EXIT_INTERRUPTED),
        # SIGTERM before the first update ends a run like any program.
        signal.SIGTERM: (0, EXIT_PREEMPTED, -signal.SIGTERM),
    }
    end_seconds = DEADLINE_SECONDS  # it saves first
    tracebacks = ("Traceback (most recent call last)",)

    def __init__(self, words: Sequence[str], folder: pathlib.Path, **how: Any):
        self.folder = folder
        words = [_MODULE, *words, f"--model_dir={folder}"]
        super().__init__(words, folder.with_suffix(".log"), name="a run", **how)
        self._leftovers: set[pathlib.Path] = set()
        every = [text for text in words if text.startswith("--evaluation.every_steps=")]
        self._evaluation_steps = int(every[-1].partition("=")[2])

    @classmethod
    def given(
        cls,
        flags: argparse.Namespace,
        cache_dir: object,
        folder: pathlib.Path,
        settings: Sequence[str],
    ) -> "Run":
        """Returns a run of the task, preset and steps of `flags`, in a fresh process."""
        steps = {"train_steps": flags.steps, "checkpoint.every_steps": max(1, flags.steps // 12)}
        steps |= {"evaluation.every_steps": max(1, flags.steps // 8)}
        of = {"preset": flags.preset, "task": flags.task, "cache_dir": cache_dir}
        return cls(changed(*_flags(of | steps | _GIVEN), *settings), folder)

    def start(self, *more: str, **how: Any) -> Command:
        self._leftovers = set(self._partial_checkpoints())
        return super().start(*more, **how)

    def lines(self) -> list[dict]:
        return metrics_of(self.folder)

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def checkpoint(self) -> int:
        return checkpoints(self.folder)[-1]

    def is_training(self) -> bool:
        return "this run" in self.output()

    def is_saving(self) -> bool:
        return not self._leftovers.issuperset(self._partial_checkpoints())

    def _partial_checkpoints(self) -> list[pathlib.Path]:
        return [*self.folder.glob("checkpoint_*tmp*")]

    def is_evaluating(self) -> bool:
        """Returns whether the last step has training metrics but not yet its due evaluation."""
        every, last = self._evaluation_steps, next(reversed(self.lines()), None)
        return bool(last and every and last["split"] == "train" and last["step"] % every == 0)

    def waits_for(self) -> str:
        """Returns what the run waits for, where it follows a build; "" if it does not wait."""
        begins, ends = "waiting for ", "went on after "
        lines = self.output().splitlines()
        last = next((line for line in reversed(lines) if line.startswith((begins, ends))), ends)
        return "" if last.startswith(ends) else last.removeprefix(begins).partition(" of ")[0]

    def _doing(self) -> str:
        if what := self.waits_for():
            return f"waiting for {what}"
        if not self.is_training():
            return "starting"
        if self.is_saving():
            return "writing a checkpoint"
        if self.is_evaluating():
            return "evaluating"
        return "making updates" if self.step() > self.checkpoint() else "before its first update"


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def warm(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    """Imports what runs need, without starting JAX; builds the caches of all trials."""
    if flags.cache_dir:
        return
    for module in _MODULES:
        importlib.import_module(module)
    texts, caches = small_tokenizers.documents(260), folder / "caches"
    folder.mkdir()
    small_tokenizers.t5(folder / "t5", texts[:80], 400, byte_fallback=True)
    for name, some, separator in (("a", texts[:60], "none"), ("b", texts[60:90], "eos")):
        rows = [{"id": f"{name}{number}", "text": text} for number, text in enumerate(some)]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        _build(folder, "lm", f"--name={name}", f"--corpus=json:{path}?validation=0.2",
               f"--separator={separator}", "--row_tokens=50", "--packing=concat")  # fmt: skip
    pairs = [{"q": text[:50], "a": text[50:70] or "x"} for text in texts[90:]]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    spec = f"json:{folder}/q.jsonl?inputs=q&targets=a&validation=0.2"
    _build(folder, "supervised", "--name=a", f"--corpus={spec}")
    for name, objectives in itertools.product("ab", _MODELS.values()):
        for objective in {*objectives} - {"lm", "supervised"}:
            if not (link := caches / f"{name}_{objective}").exists():
                link.symlink_to(caches / f"{name}_lm")


def _build(folder: pathlib.Path, objective: str, *flags: str) -> None:
    done = in_process.run(
        "pipeline.build", f"--task={objective}", f"--vocabulary={folder}/t5.model",
        f"--extra_ids={_SENTINELS}", f"--cache_dir={folder}/caches", "--shard_bytes=6000",
        "--max_quarantined=0.5", *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


Window = tuple[int, ...]


class Trial:
    """A drawn run; `run` raises a Difference."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        self.random = random.Random(f"{flags.seed} runs {number}")
        self._given = flags if flags.cache_dir else None
        self._folder, self._shared = folder / str(number), folder / "shared"
        self._folder.mkdir()
        self.said, self.counts = list[str](), collections.Counter[str]()
        self._flags: dict[str, Any] = {}

    def _draw(self) -> None:
        pick, chance = self.random.choice, self.random.random
        self._model = pick((*_MODELS, "t5_1_1_tiny", "lm_tiny"))
        self._objective = pick(_MODELS[self._model])
        flags = {name: pick(values) for name, values in _FLAGS.items()}
        self._inputs, self._targets = (0, pick((16, 24)))
        if self._model == "t5_1_1_tiny" or self._objective in ("prefix_lm", "span_corruption"):
            self._inputs = pick((24, 32))
            self._inputs = 56 if self._objective == "supervised" else self._inputs
            flags["lengths.inputs"] = self._inputs
            self._targets = {"span_corruption": 14, "ul2": 40, "supervised": 32}.get(
                self._objective, self._inputs
            )
        if self._model == "bert_tiny":
            flags["lengths.inputs"] = self._targets
        flags |= {"lengths.targets": self._targets, "batch_size": pick((4, 8))}
        flags["train_steps"] = self.random.randint(6, 12)
        flags["optimizer.learning_rate"] = 0.01 if flags["optimizer.name"] != "adafactor" else 0.3
        if flags["optimizer.schedule"] != "constant":
            flags |= {"optimizer.warmup_steps": 3, "optimizer.steps_per_cycle": 12}
        if chance() < 0.3:
            flags["checkpoint.best_metric"] = "loss"
        if chance() < 0.3:
            flags |= {"plateau.metric": "loss", "plateau.patience": 1, "plateau.min_delta": 0.5}
        if chance() < 0.2:
            flags |= {"stopping.metric": "loss", "stopping.patience": 2, "stopping.min_delta": 0.4}
        if chance() < 0.2 and flags["data.shuffle"] != "block":
            # Small shares are read several times.
            flags["data.take"] = 0.5 if flags["microbatches"] == 2 else 0.05
        if chance() < 0.15:
            flags |= {"lora.rank": 2} if "lora" in annexes.entries("settings") else {}
        elif chance() < 0.15:
            flags["trainable"] = "decoder|mlp"
        if flags["data.shuffle"] == "block":
            flags["data.block_bytes"] = 30_000
        if chance() < 0.2 and self._objective in ("span_corruption", "supervised"):
            flags |= {"data.pack_examples": "true", "lengths.targets": 3 * self._targets}
            flags |= {"lengths.inputs": 3 * self._inputs}
            if self._objective != "supervised":
                flags |= {"data.example_inputs": self._inputs}
                flags |= {"data.example_targets": self._targets}
        watches = ("plateau", "stopping", "checkpoint.best_metric")
        if flags["evaluation.every_steps"] == 0:
            flags = {name: value for name, value in flags.items() if not name.startswith(watches)}
        for stack in ("encoder", "decoder"):
            if self._model in _STACKS[stack]:
                flags[f"model.num_{stack}_layers"] = pick((1, 1, 2))
        flags["task"] = self._mixture(flags)
        self._flags = flags

    def _mixture(self, flags: dict[str, Any]) -> str:
        one, other = f"a_{self._objective}", f"b_{self._objective}"
        if self._objective == "full_lm":
            return other
        if self._objective == "supervised" or self.random.random() < 0.6:
            return one
        self._rate = self.random.choice((0.5, 0.7, 0.9))
        if self.random.random() < 0.3:
            flags["mixing.schedule"] = f"3: {one}=0.2,{other}=0.8"
        return f"{one}={self._rate},{other}={round(1 - self._rate, 1)}"

    def _run(self, name: str, **more: Any) -> Run:
        folder = self._folder / name
        if self._given:
            return Run.given(self._given, self._given.cache_dir, folder, self._given.settings)
        fixed = {"metrics.every_steps": 1, "metrics.tensorboard": "false", "preset": self._model}
        words = _flags(self._flags | {"cache_dir": self._shared / "caches"} | fixed | more)
        return Run(words, folder, fresh=False, watched=self._folder)

    def _command(self, *words: str) -> Command:
        return Command(words, self._log, fresh=False, watched=self._folder)

    @property
    def _log(self) -> pathlib.Path:
        return self._folder / "command.log"

    def run(self) -> str:
        """Runs the trial; returns what was tried, in words."""
        if self._given:
            return self._run_given()
        plain = self._drawn_run()
        kills = draw_kills(self.random, plain, self.random.choice((1, 1, 2, 3)))
        self._disturb(self._run("b"), kills)
        self._check_same("a", "b")
        self.said.append(in_fork(self._check_batches, self._log))
        compare = annexes.entries("commands.training").get("compare")
        if compare and self.random.random() < 0.5:
            folders = [str(self._folder / name) for name in "ab"]
            self._command(compare, *folders, "--batches=-1").succeed()
            self.note("compared")
        if self.random.random() < 0.25:
            self._start_from()
        if self.random.random() < 0.25 and self._flags["evaluation.every_steps"]:
            self.note(in_fork(self._evaluate, self._log))
        if self.random.random() < 0.3 and len(checkpoints(self._folder / "a")) > 2:
            self._damage_checkpoint("e")
        if self.random.random() < 0.3:
            self._start_twice()
        return f"{self.describe()}: {'; '.join(self.said)} ({plain.seconds:.0f} s a run)"

    def note(self, what: str) -> None:
        self.said.append(what)
        self.counts[what] += 1

    def _disturb(self, run: Run, kills: Sequence[Any], of: str = "") -> None:
        said = run.disturb(kills)
        self.said += [f"{of}{each}" for each in said]
        self.counts.update({f"{of}{each.split()[0]}": times for each, times in said.items()})

    def _check_same(self, one: str, other: str) -> None:
        folders = [self._folder / name for name in (one, other)]
        in_fork(functools.partial(self._same, *folders), self._log)

    def _same(self, *folders: pathlib.Path) -> str:
        if found := run_differences(*folders):
            raise Difference(f"{self.describe()}: {len(found)} differences, first {found[:3]}")
        return "equal"

    # --- a given run

    def _run_given(self) -> str:
        begin, plain = time.monotonic(), self._run("a")
        plain.start().wait_until(lambda: bool(plain.lines()))
        self._start_seconds = time.monotonic() - begin
        plain.finish()
        of, runs = self._given, 0
        while not runs or self.counts["kills"] < of.kills:
            runs += 1
            run, last = self._run(f"killed-{runs}"), of.steps * 9 // 10
            # Ascending, and early enough that the run is unlikely to finish before its kill.
            missing = range(of.kills - self.counts["kills"])
            for target in sorted(self.random.randrange(1, last) for _ in missing):
                if not self._kill_at(run, target):
                    break
            run.succeed()
            self._check_same("a", run.folder.name)
            shutil.rmtree(run.folder)
        for number in range(of.damages):
            self._damage_checkpoint(f"damaged-{number}")
        self._start_twice()
        self._edit_task()
        return f"final state and {len(plain.lines())} lines of metrics are equal, bit for bit"

    def _kill_at(self, run: Run, target: int) -> bool:
        """Starts the run and kills it, at its start or after the step `target`.

        Returns whether it was killed, and did not finish first.
        """
        (phase,) = self.random.choices([*_PHASE_WEIGHTS], [*_PHASE_WEIGHTS.values()])
        run.start()
        if phase == "start":
            time.sleep(self.random.uniform(0, self._start_seconds))
        else:
            in_phase = {"evaluation": run.is_evaluating, "checkpoint": run.is_saving}.get(phase)
            run.wait_until(
                lambda: run.step() >= target and run.is_training() and (not in_phase or in_phase())
            )
            time.sleep(self.random.uniform(0, 0.05))
        number = draw_signal(self.random)
        stop_before_kill(number, run)
        if not run.running:
            run.finish()
            return False
        self.note(f"{number.name} while {run.activity()}")
        self.counts["kills"] += 1
        run.end(number)
        return True

    def _damage_checkpoint(self, name: str) -> None:
        """Damages the newest checkpoint of a copy of the run without its last, and resumes."""
        run = self._run(name)
        shutil.copytree(self._folder / "a", run.folder)
        shutil.rmtree(run.folder / f"checkpoint_{run.checkpoint()}")
        newest, kind = run.folder / f"checkpoint_{run.checkpoint()}", self.random.choice(_DAMAGES)
        path = any_file(newest, self.random)
        damage(path, kind, self.random)
        done, outcome = run.run(), "harmless"
        if done.code:
            outcome = "named; fell back"
            said = done.output.splitlines()[-1]
            wanted = ("is damaged", "newest sound one is checkpoint_")
            if done.code != EXIT_USER_ERROR or not all(text in said for text in wanted):
                raise Difference(f"{kind} in {path}: code {done.code}, {said}")
            run.succeed("--checkpoint.on_damage=fall_back")
        self._check_same("a", name)
        self.note(f"checkpoint damaged ({kind}): {outcome}")

    def _start_twice(self) -> None:
        """Starts a run and then another in its folder, which must be refused."""
        run, second = self._run("twice"), self._run("twice")
        second.log = self._folder / "second.log"
        run.start().wait_until(lambda: bool(run.lines()))
        run.signal_group(signal.SIGSTOP)
        if not run.running:
            return
        second.refuse("another run is writing")
        run.signal_group(signal.SIGCONT)
        run.finish()
        self._check_same("a", "twice")
        self.note("second run refused")

    def _edit_task(self) -> None:
        """Resumes a run with another objective of its task, which is refused, then with its own."""
        run, module = self._run("edited"), self._folder / f"{_EDITED_MODULE}.py"
        shutil.copytree(self._folder / "a", run.folder)
        shutil.rmtree(run.folder / f"checkpoint_{run.checkpoint()}")
        module.write_text(_EDITED_TASK % self._given.task)
        path = os.pathsep.join(filter(None, (str(self._folder), os.environ.get("PYTHONPATH"))))
        run.start(f"--task_module={_EDITED_MODULE}", env={**os.environ, "PYTHONPATH": path})
        run.expect_refusal(f"objective of {self._given.task}")
        module.unlink()
        run.succeed()
        self._check_same("a", "edited")
        self.note("edited task refused")

    # --- a random run

    def _drawn_run(self) -> Done:
        """Draws until a run is not refused, which must take one line; returns the run."""
        for _ in range(20):
            self._draw()
            done = self._run("a").run()
            if done.code == 0:
                return done
            lines = [line for line in done.output.splitlines() if "error: " in line]
            if done.code != 2 or len(lines) != 1:
                break
            self.said.append(f"refused: {lines[0].partition('error: ')[2][:100]}")
            shutil.rmtree(self._folder / "a", ignore_errors=True)
        raise Difference(f"{self.describe()}: code {done.code}, {done.output[-1500:]}")

    def describe(self) -> str:
        shown = ("task", "data.shuffle", "microbatches", "model.dtype", "optimizer.name")
        words = ("plateau.metric", "stopping.metric", "lora.rank", "trainable", "mixing.schedule")
        words += ("data.take", "data.pack_examples")
        more = [each for each in words if each in self._flags]
        return " ".join([self._model, *(str(self._flags.get(each)) for each in shown), *more])

    def _start_from(self) -> None:
        """Starts another run from the finished one, undisturbed and killed."""
        state = self.random.choice(("true", "false"))
        steps = self._flags["train_steps"] * (1 + (state == "true"))
        more = {"init_from": self._folder / "a", "init_from_state": state, "train_steps": steps}
        plain = self._run("c", **more).run()
        if plain.code == 2:
            self.said.append(f"init_from refused: {plain.output.splitlines()[-1][-100:]}")
            return
        if plain.code:
            raise Difference(f"{self.describe()}: init_from: {plain.code}, {plain.output[-1500:]}")
        self._disturb(self._run("d", **more), draw_kills(self.random, plain, 1), "init_from, ")
        self._check_same("c", "d")

    def _evaluate(self) -> str:
        """`trainer.evaluate` must find the loss of the run's last evaluation."""
        done = in_process.run("trainer.evaluate", f"--model_dir={self._folder}/b")
        if done.returncode:
            raise Difference(f"trainer.evaluate: {done.stderr[-1000:]}")
        lines = map(json.loads, (self._folder / "b/metrics.jsonl").read_text().splitlines())
        (*_, last) = (line for line in lines if line["split"] == "validation")
        found = json.loads((self._folder / "b/evaluation.json").read_text())["checkpoints"]
        for step, splits in found.items():
            loss = splits["validation"]["loss"]
            if int(step) == last["step"] and abs(loss - last["metrics"]["loss"]) > 1e-4 * abs(loss):
                raise Difference(
                    f"evaluate finds the loss {loss}, the run {last['metrics']['loss']}"
                )
        return "evaluated"

    def _check_batches(self) -> str:
        """Compares windows of all batches with the cache's; returns what was checked, in words."""
        from trainer.config import load_config
        from trainer.setup import prepare

        config, origins = load_config(str(self._folder / "a"))
        data, steps = prepare(config, origins).data, config.train_steps
        self._check_hosts(data, self.random.sample(range(steps), 2))
        if self._objective in _NOT_UNDONE or config.data.pack_examples:
            return "hosts"
        self._sources = {
            each.task.name: Windows(pathlib.Path(each.cache), self._window) for each in data.tasks
        }
        explain = annexes.entries("commands.training").get("explain")
        explanation = explain and annexes.load(f"{explain.rpartition('.')[0]}.explanation")
        batches, taken = data.batches(), {name: list[Window]() for name in self._sources}
        for step in range(steps):
            explained = None
            if explanation and step in (0, steps - 1):
                explained = explanation.Explanation(str(self._folder / "a"), step + 1)
            batch = {name: values.tolist() for name, values in batches[step].items()}
            for row in range(config.batch_size):
                window = self._undone({name: values[row] for name, values in batch.items()})
                names = [name for name, of in self._sources.items() if window in of.counts]
                if not names:
                    raise Difference(f"{self.describe()}: row {row} of batch {step}: {window}")
                taken[names[0]].append(window)
                if explained:
                    self._check_explained(explained.row(row), window)
        for name, of in self._sources.items():
            of.check_epochs(
                taken[name], self._flags.get("data.take"), config.data.shuffle == "none"
            )
        self._check_rates([len(of) for of in taken.values()], steps * config.batch_size)
        return f"{sum(map(len, taken.values()))} windows"

    def _check_hosts(self, data: Any, steps: Sequence[int]) -> None:
        batches, halves = data.batches(), [data.batches(host, 2) for host in range(2)]
        for step in steps:
            parts = [half[step] for half in halves]
            for name, values in batches[step].items():
                rows = [row for part in parts for row in part[name].tolist()]
                if rows != values.tolist():
                    raise Difference(f"{self.describe()}: two hosts read another batch {step}")

    def _check_rates(self, counts: list[int], rows: int) -> None:
        """Rates are exact to within two rows, also after a change at the third update."""
        if len(counts) == 2:
            before = 3 * self._flags["batch_size"] if "mixing.schedule" in self._flags else rows
            first = self._rate * before + 0.2 * (rows - before)
            if abs(counts[0] - first) > 2:
                raise Difference(f"{self.describe()}: {counts} rows, {first} of the first wanted")

    @property
    def _window(self) -> int:
        """The tokens of a window, by the objectives' definitions."""
        if self._objective == "span_corruption":
            return _span_window(self._inputs, self._targets)
        less = {"lm": self._targets - 1, "prefix_lm": self._inputs - 1}
        return less.get(self._objective, self._targets)

    def _undone(self, row: dict[str, list[int]]) -> Window:
        """Returns the window that a row was made of."""
        targets = row["decoder_target_tokens"]
        if "encoder_input_tokens" in row:
            sides = [row["encoder_input_tokens"], targets]
        elif self._inputs:
            first = row["decoder_loss_weights"].index(1)
            sides = [targets[:first], targets[first:]]
        else:
            window = [token for token in targets if token]
            return tuple(window[:-1] if self._objective == "lm" else window)
        inputs, outputs = ([token for token in side if token] for side in sides)
        ended = ([*side[:-1]] if side[-1:] == [1] else side for side in (inputs, outputs))
        return tuple(rebuilt(*ended, self._vocabulary_size() - _SENTINELS))

    @functools.cache  # noqa: B019 - a trial is a process
    def _vocabulary_size(self) -> int:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(self._shared / "t5.model"))
        return model.get_piece_size() + _SENTINELS

    def _check_explained(self, found: Any, window: Window) -> None:
        of = self._sources[found.task]
        if of.windows[found.window] != window:
            raise Difference(f"{self.describe()}: explain names window {found.window}")
        ids, wanted = [part.id for part in found.parts], of.documents(found.window)
        if ids != wanted:
            raise Difference(f"explain names {ids} in window {found.window}, not {wanted}")

    def clean(self) -> None:
        shutil.rmtree(self._folder)


def _span_window(inputs: int, targets: int) -> int:
    """Returns the most tokens whose example fits, with 15 % noise in spans of 3 in the mean."""

    def fits(tokens: int) -> bool:
        noise = round(0.15 * tokens)
        spans = max(1, round(noise / 3))
        return tokens - noise + spans + 1 <= inputs and noise + spans + 1 <= targets

    return max(filter(fits, range(2, 2 * inputs)))


class Windows:
    """The windows of a cache's training split, by a reader of its own."""

    def __init__(self, cache: pathlib.Path, length: int):
        self._length = length
        stream, self._begins = list[int](), list[tuple[int, str]]()
        for path in sorted(cache.glob("train.tfrecord-*")):
            begins, base = [0], len(stream)
            for row in read_rows(path.read_bytes()):
                begins.append(begins[-1] + len(row["targets"]))
                stream += row["targets"]
            table = path.with_name(path.name.replace("tfrecord", "documents") + ".parquet")
            for piece in pq.read_table(table).to_pylist():
                self._begins.append((base + begins[piece["row"]] + piece["position"], piece["id"]))
        self._stream = len(stream)
        cut = range(0, len(stream) - length + 1, length)
        self.windows = [tuple(stream[at : at + length]) for at in cut]
        self.counts = collections.Counter(self.windows)

    def documents(self, window: int) -> list[str]:
        """Returns the ids of the documents in a window, in their order."""
        begin, end = window * self._length, (window + 1) * self._length
        ends = [place for place, _ in self._begins[1:]] + [self._stream]
        return [
            name
            for (place, name), after in zip(self._begins, ends, strict=True)
            if place < end and after > begin
        ]

    def check_epochs(self, taken: Sequence[Window], share: float | None, in_order: bool) -> None:
        """Raises a Difference unless each epoch reads every window once."""
        windows = self.windows[: int(round(len(self.windows) * (share or 1), 6))]
        for number in range(-(-len(taken) // len(windows))):
            epoch = taken[number * len(windows) :][: len(windows)]
            if over := collections.Counter(epoch) - collections.Counter(windows):
                raise Difference(
                    f"epoch {number} reads {over.total()} of {len(windows)} windows too often"
                )
            if in_order and epoch != windows[: len(epoch)]:
                raise Difference(f"epoch {number} does not read windows in the cache's order")
