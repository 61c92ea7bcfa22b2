"""Random runs of small models, in forks: batches against the cache, killed, damaged, refused."""

import argparse
import collections
import functools
import importlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from tasks import annexes
from tests.laboratory import run_trials
from tests.laboratory.commands import Command, Difference, Done, draw_kills, in_fork
from tests.laboratory.comparing import checkpoints
from tests.laboratory.run_trials import Run, words_of
from tests.support import in_process, small_tokenizers
from tests.support.plain_records import read_rows
from tests.support.spans import rebuilt
from trainer.config.optimizer import OPTIMIZERS

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


def warm(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    """Imports what runs need, without starting JAX; builds the caches of all trials."""
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


class Trial(run_trials.Trial):
    """A drawn run."""

    def __init__(self, flags: argparse.Namespace, number: int, folder: pathlib.Path):
        super().__init__(flags, number, folder)
        self._shared, self._flags = folder / "shared", dict[str, Any]()

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
        fixed = {"metrics.every_steps": 1, "metrics.tensorboard": "false", "preset": self._model}
        words = words_of(self._flags | {"cache_dir": self._shared / "caches"} | fixed | more)
        return Run(words, self._folder / name, fresh=False, watched=self._folder)

    def run(self) -> str:
        """Runs the trial; returns what was tried, in words."""
        plain = self._drawn_run()
        kills = draw_kills(self.random, plain, self.random.choice((1, 1, 2, 3)))
        self._disturb(self._run("b"), kills)
        self._check_same("a", "b")
        self.said.append(in_fork(self._check_batches, self._log))
        compare = annexes.entries("commands.training").get("compare")
        if compare and self.random.random() < 0.5:
            words = [compare, self._folder / "a", self._folder / "b", "--batches=-1"]
            Command(words, self._log, fresh=False, watched=self._folder).succeed()
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

    def _disturb(self, run: Run, kills: Sequence[Any], of: str = "") -> None:
        said = run.disturb(kills)
        self.said += [f"{of}{each}" for each in said]
        self.counts.update({f"{of}{each.split()[0]}": times for each, times in said.items()})

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
