"""Configurations of batches as clients send them: checked, and opened on the server's caches."""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from palimpsest.annexes.batch_service.tickets import MOST
from tasks import annexes, registry
from tasks.cache.manifest import MANIFEST, cache_names
from tasks.cache.plan_check import is_replaced
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import Config, as_batches, stored_config
from trainer.config.phases import parse
from trainer.config.presets import model_preset
from trainer.data.mixing import mixtures_of
from trainer.data.run_batches import Batches, Spec
from trainer.reading import BESIDE, CacheBatches, batches, settings_of

_Value = TypeVar("_Value")
# The longest row, the positions of all rows of a batch, and the entries of a schedule; so much is
# opened before the batches' own sizes are known.
_LONGEST_ROW, _MOST_POSITIONS, _MOST_ENTRIES = 1 << 20, 1 << 26, 256
# Parts of the batches of a configuration that are kept open.
_PARTS = 64
_PRESET = "t5_1_1_small"
# A name is joined to the caches' folder.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A client's configuration, checked; `key` is its text, `tasks` the tasks that it reads."""

    key: str
    config: Mapping[str, Any]
    tasks: tuple[str, ...]


class Opener:
    """Opens configurations on the caches in `cache_dir`, whatever else they say."""

    def __init__(
        self,
        cache_dir: str,
        task_module: str | None = None,
        local_dir: str | None = None,
        local_bytes: int = 50 << 30,
    ):
        """Raises UserError if there are no caches, or the module cannot be imported."""
        self._cache_dir, self._task_module = cache_dir, task_module
        self._here: dict[str, Any] = {"cache_dir": cache_dir}
        if files.is_remote(cache_dir):
            self._here |= {"data.local_dir": local_dir, "data.local_bytes": local_bytes}
        if task_module:
            registry.load(task_module)
        if not files.exists(files.join(cache_dir, MANIFEST)) and not cache_names(cache_dir):
            raise UserError(
                f"--cache_dir={cache_dir} holds no caches: build one with pipeline.build"
            )
        # What a configuration may set; its data.local_dir, for one, would name a folder here.
        self._known = as_batches(Config(_PRESET, model_preset(_PRESET)))
        self._read = functools.lru_cache(256)(self._checked)

    def asked(self, config: Mapping[str, Any]) -> Asked:
        """Returns a client's configuration; raises UserError if it is wrong or too large."""
        return self._sound(lambda: self._read(json.dumps(config, sort_keys=True)))

    def _checked(self, key: str) -> Asked:
        config = json.loads(key)
        beside = {name: value for name in BESIDE if (value := config.pop(name, None))}
        self._refuse_unknown(config)
        config["task_module"] = self._task_module
        if not config.get("task"):
            raise UserError("config names no task")
        if "preset" not in config:  # flags, as a client of another language writes them
            config = settings_of(config)
        config.setdefault("model", self._known["model"])
        read = stored_config(config, "config")
        _check_size(read)
        read = dataclasses.replace(read, cache_dir=self._cache_dir)
        names = [name for _, each in mixtures_of(read) for name in each.names]
        for name in names:
            if not _NAME.fullmatch(name):
                raise UserError(f"task {name!a:.60} is no name of a task")
        return Asked(key, config | beside, tuple(dict.fromkeys(names)))

    def _refuse_unknown(self, config: dict[str, Any]) -> None:
        groups = {"data": self._known["data"]}
        for name, value in config.items():
            known = [*self._known] if name not in groups else [*groups[name]]
            given = [name] if name not in groups else value if isinstance(value, dict) else [value]
            for each in given:
                if each not in known:
                    raise UserError(f"config has {str(each)!a:.60}, on which no batches depend")
        for name in annexes.entries("caches"):
            if config.pop(name, None):
                raise UserError(f"config has {name}, but finished caches are read: leave it out")

    def open(self, asked: Asked) -> "Opened":
        """Returns the opened batches; raises UserError as `palimpsest.batches` does."""
        return self._sound(lambda: Opened(asked, batches(config=asked.config, **self._here)))

    def hiding(self, error: UserError) -> UserError:
        """Returns an error that does not name the caches' folder on this machine."""
        return UserError(str(error).replace(self._cache_dir, "--cache_dir"))

    def _sound(self, make: Callable[[], _Value]) -> _Value:
        """Returns what `make` returns of a client's values.

        Raises UserError also for values of a wrong type, and names no folder of this machine.
        """
        try:
            return make()
        except UserError as error:
            raise self.hiding(error) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"config is not as palimpsest.batches(…).config: {what}") from error


def _check_size(config: Config) -> None:
    """Raises UserError for batches that no server should begin to open."""
    entries = [each.values for each in parse(config.batch_schedule)]
    longer = [each.values for each in parse(config.length_schedule, ("inputs", "targets"))]
    changes = len(entries) + len(longer) + config.mixing.schedule.count(";")
    if changes > _MOST_ENTRIES:
        raise UserError(f"config's schedules have {changes} entries, more than {_MOST_ENTRIES}")
    given = dataclasses.asdict(config.lengths), *longer
    lengths = [value for each in given for value in each.values() if value is not None]
    lengths += [config.data.example_inputs or 0, config.data.example_targets or 0]
    rows, longest = max(config.batch_size, *(each["rows"] for each in entries), 1), max(lengths)
    if longest > _LONGEST_ROW or rows * max(longest, 1) > _MOST_POSITIONS:
        raise UserError(
            f"config has batches of {rows:,} rows of {longest:,} tokens, more than is served"
        )


class Opened:
    """An opened configuration.

    `record` is a digest of all that determines the examples beside caches and configuration: the
    code of objectives, and rates that follow from sizes.
    """

    def __init__(self, asked: Asked, whole: Batches):
        assert isinstance(whole, CacheBatches)
        self.key, self.tasks, self._whole = asked.key, list(asked.tasks), whole
        # The name of the server's own module of tasks is not for clients.
        self._config = whole.config | {"task_module": None}
        record = json.dumps(whole.data.record, sort_keys=True)
        self.record = hashlib.sha256(record.encode()).hexdigest()[:32]
        # Names the batches, as `key` does not where it leaves out the caches' fingerprints.
        self.batches_key = json.dumps([self._config, self.record], sort_keys=True)
        self.end = whole.length_or(MOST)
        self._part = functools.lru_cache(_PARTS)(whole.shard)
        # False once a batch has held a value beyond uint16.
        self.narrow = True

    @property
    def replaced(self) -> bool:
        """True if a cache has another plan by now."""
        tasks = self._whole.data.tasks
        return any(is_replaced(each.cache, each.manifest.plan.fingerprint) for each in tasks)

    @property
    def description(self) -> dict[str, Any]:
        """The whole configuration, the number of batches, and `record`, as JSON."""
        length = self._whole.length
        return {"config": self._config, "length": length, "record": self.record}

    def check(self, step: int) -> None:
        """Raises UserError if there is no such batch."""
        if not 0 <= step < self.end:
            raise UserError(f"there is no batch {step:,}: there are {self.end:,}")

    def batch(self, step: int, index: int, parts: int) -> Mapping[str, np.ndarray]:
        """Returns rows of a batch; raises UserError unless `parts` divides them."""
        return self._part(index, parts)[step]

    def spec(self, step: int, index: int, parts: int) -> Spec:
        """Returns feature -> (shape, dtype) of rows of a batch."""
        part = self._part(index, parts).shard(0, 1)  # a copy on the same open caches
        part.state = step
        return part.spec

    def explain(self, step: int, row: int) -> list[Any]:
        """Returns the documents of a row, as JSON; raises UserError if there is no such row."""
        self.check(step)
        return [list(document) for document in self._whole.explain(step, row)]
