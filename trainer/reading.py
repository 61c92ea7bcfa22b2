"""A run's batches for other programs: `batches`, which `palimpsest.batches` is.

A process that reads them imports neither JAX nor TensorFlow.
"""

import os
from collections.abc import Mapping
from typing import Any

from tasks import annexes
from tasks.terminal import command_line, extras, toml_flags
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.flag_fields import shown
from tasks.terminal.flags import parse
from trainer.checkpoints import metadata
from trainer.config import Config, as_batches, field_paths, from_flags, load_record, stored_config
from trainer.config.presets import model_preset
from trainer.data import cached_task, task_record
from trainer.data.cached import CachedData
from trainer.data.held_out import HeldOut
from trainer.data.mixing import mixtures_of
from trainer.data.run import Data
from trainer.data.run_batches import Batches, Law
from trainer.setup import opened

__all__ = ["batches"]

# Architecture -> the preset whose features batches have if no preset is named.
_PRESETS = {"encoder_decoder": "t5_1_1_small", "decoder": "lm_small", "encoder": "bert_base"}
# Flags that say from where and how fast batches are read, not what they hold.
_HERE = ("cache_dir", "data.local_dir", "data.local_bytes", "data.threads", "data.prefetch")
# What `Batches.config` holds besides a run's settings.
BESIDE = ("caches", "split")
# Argument -> its type, also in words.
_KINDS: dict[str, tuple[Any, str]] = {
    "task": (str, "a text"),
    "model_dir": (str | os.PathLike, "a path"),
    "config": (Mapping, "a dict"),
    "caches": (Mapping, "a dict"),
    "split": (str, "a text"),
}
# Tokens of a batch, beyond any machine's memory.
_LARGEST = 1 << 40
# Positions of a preset's model that says nothing about them; no row is as long.
_ANY_LENGTH = 1 << 20


def batches(
    source: str | None = None,
    /,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    split: str | None = None,
    **flags: Any,
) -> Batches:
    """Returns the batches of a run: batch k is a function of the run's settings and k.

    They are named in one of three ways:

    - by a task or mixture, "a=0.7,b=0.3", and the flags of `palimpsest pretrain` that determine
      batches: `cache_dir`, `seed`, `batch_size`, `batch_schedule`, `lengths`, `length_schedule`,
      `mixing`, `objective`, `data`, `task_module`, `preset`. Groups are dicts, as in
      `lengths={"inputs": 512}`, or dotted, as in `**{"lengths.inputs": 512}`. Without a preset,
      features are for the first kind of model that the task names, an encoder-decoder if it has
      inputs; `preset="lm_small"` gives a decoder's. Without `train_steps` or `train_tokens` the
      batches are endless;
    - by `model_dir`, the folder of a run, whose very batches they are;
    - by `config`, as `Batches.config` has it.

    The last two take `cache_dir` and the flags that say how to read, such as `data.threads`.
    `source` is the task, or the address of a service, "SCHEME://HOST:PORT", which opens its own
    caches and takes the same arguments, the task as `task`.

    Another `split`, such as "validation", has every window once, task after task, always with the
    same noise, as evaluations read it.

    Raises UserError, one line, for what the command refuses.
    """
    task = flags.get("task", source)
    _check_kinds({"task": task, "model_dir": model_dir, "config": config, "split": split})
    _check_kinds(config or {}, "config.")
    with extras.named(), command_line.storage_named():
        address = source if source and "://" in source else None
        if source and not address:
            flags = {"task": source, **flags}
        found = _configured(model_dir, config, flags)
        if split := split or (config or {}).get("split"):
            found[-1]["split"] = split
        return _served(address, *found) if address else _opened(*found)


def _check_kinds(given: Mapping[str, Any], within: str = "") -> None:
    """Raises UserError for an argument of another type."""
    for name, value in given.items():
        kind, words = _KINDS.get(name, (object, ""))
        if not (value is None or isinstance(value, kind)):
            raise UserError(f"batches: {within}{name} is {shown(value)}: it must be {words}")
        if value == "" and name in _KINDS:
            raise UserError(f"batches: {within}{name} is empty")


class CacheBatches(Batches):
    """Batches from caches; a process that gets the object opens them itself."""

    def __init__(
        self,
        data: CachedData,
        config: Config,
        length: int | None,
        given: Mapping[str, Any],
        law: Law | None = None,
    ):
        reading, again = config.data, law is not None
        super().__init__(law or data, length, reading.threads, reading.prefetch, again)
        self.data, self._given = data, given

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._given, self.config, self.part, self.state)


def _reopened(
    given: Mapping[str, Any], config: Mapping[str, Any], part: tuple[int, int], state: int
) -> Batches:
    found = batches(**given)
    if found.config != config:
        raise UserError(f"{given.get('cache_dir')}: the caches have changed since they were opened")
    found = found.shard(*part)
    found.state = state
    return found


def _configured(
    model_dir: str | os.PathLike[str] | None,
    config: Mapping[str, Any] | None,
    flags: Mapping[str, Any],
) -> tuple[Config, dict[str, str], bool, dict[str, Any]]:
    """Returns (configuration, origins, whether batches are endless, the arguments)."""
    named = {"task": flags.get("task"), "model_dir": model_dir, "config": config}
    if len(chosen := {name: each for name, each in named.items() if each is not None}) != 1:
        raise UserError(f"batches: give one of a task, model_dir and config, not {len(chosen)}")
    given = {**chosen, **flags}
    if config is None and model_dir is None:
        return *_of_flags(flags), given
    values = _values(flags)
    if model_dir is not None:
        found, origins = metadata.load_config(os.fspath(model_dir))
        endless = False
    else:
        plain = {name: each for name, each in (config or {}).items() if name not in BESIDE}
        found, origins = stored_config(plain, "config"), {}
        endless = "train_steps" not in plain and plain.get("train_tokens") is None
    if others := sorted(values.keys() - {*_HERE}):
        by = "config" if model_dir is None else "model_dir"
        raise UserError(f"batches: {by} determines {others[0]}: leave it out")
    return field_paths.replace_all(found, values), dict(origins), endless, given


def _values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns field path -> value of flags; raises UserError for one that no batch depends on."""
    words = toml_flags.words(from_flags.RunFlags, flags)
    parsed = parse(from_flags.RunFlags, words).values
    known = {*as_batches(Config("", model_preset("t5_1_1_small"))), *_HERE}
    for path in parsed:
        name = path.removeprefix("run.")
        if name not in known and name.partition(".")[0] not in known:
            hint = nearest(name, known)
            raise UserError(f"batches: {name} does not change batches{hint}: leave it out")
    return {path.removeprefix("run."): value for path, value in parsed.items()}


def _of_flags(flags: Mapping[str, Any]) -> tuple[Config, dict[str, str], bool]:
    values = _values(flags)
    given = parse(from_flags.RunFlags, toml_flags.words(from_flags.RunFlags, flags)).below("run")
    preset = values.get("preset") or _preset(given)
    config, origins = from_flags.build_config(preset, given)
    from_flags.refuse_unread(config, origins)
    if "preset" not in values and config.model.counts_positions:
        config = field_paths.replace(config, "model.max_positions", _ANY_LENGTH)
    endless = values.get("train_steps") is None and values.get("train_tokens") is None
    if endless and config.mixing.max_epochs is not None:
        raise UserError("--mixing.max_epochs divides the rows of the whole run: give train_steps")
    return config, origins, endless


def settings_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings, as `Batches.config` has them, of batches that flags name.

    Raises UserError as `batches` does for its flags.
    """
    config, _, endless = _of_flags(flags)
    return _settings(config, endless)


def _settings(config: Config, endless: bool) -> dict[str, Any]:
    found = as_batches(config)
    if endless:
        del found["train_steps"]
    return found


def _preset(given: Any) -> str:
    """Returns the preset for the first kind of model that the first task of a mixture names."""
    config, _ = from_flags.build_config(_PRESETS["encoder_decoder"], given)
    task, _ = cached_task.found(config, mixtures_of(config)[0][1].names[0])
    return _PRESETS[task.objective.architectures[0]]


def _served(
    address: str, config: Config, origins: dict[str, str], endless: bool, given: dict[str, Any]
) -> Batches:
    """Returns the batches of the service at an address."""
    scheme = address.partition("://")[0]
    open_law = annexes.get("batches", scheme)
    if open_law is None:
        known = ", ".join(f"{each}://" for each in annexes.entries("batches")) or "none"
        raise UserError(f"{address}: no service has such an address (known: {known})")
    if here := sorted(origins.keys() & {*_HERE[:3]}):
        raise UserError(f"{address} opens its own caches: leave out {here[0]}")
    beside = {**(given.get("config") or {}), **given}
    wanted = _settings(config, endless)
    wanted |= {name: beside[name] for name in BESIDE if beside.get(name)}
    # Its `length` is the number of batches, None if they are endless.
    law, again = open_law(address, wanted), "split" in wanted
    return Batches(law, law.length, config.data.threads, config.data.prefetch, again)


def _opened(
    config: Config, origins: dict[str, str], endless: bool, given: dict[str, Any]
) -> Batches:
    """Returns the batches of caches that this process opens."""
    run = opened(config, origins)
    if not isinstance(run.data, CachedData):
        raise UserError(f"task {config.task} is read in turn: batches are of cached tasks")
    largest = max(phase.tokens for phase in run.config.phases.phases)
    if largest > _LARGEST:
        raise UserError(f"a batch has {largest:,} tokens: use a smaller --batch_size or --lengths")
    if folder := given.get("model_dir"):
        read = run.config.data.skips.batch(run.config.train_steps)
        check_unchanged(os.fspath(folder), run.data, read)
    _check_caches(run.data.fingerprints, (given.get("config") or {}).get("caches"))
    if split := given.get("split"):
        law = HeldOut(run.data, split, run.config.batch_size, run.config.seed)
        return CacheBatches(run.data, run.config, len(law), given, law)
    return CacheBatches(run.data, run.config, None if endless else run.config.train_steps, given)


def _check_caches(now: Mapping[str, str], wanted: Mapping[str, str] | None) -> None:
    for task in () if wanted is None else {**wanted, **now}:
        if now.get(task) != (wanted or {}).get(task):
            raise UserError(f"the cache of {task} is not the one of config: it has another plan")


def check_unchanged(model_dir: str, data: Data, read: int) -> None:
    """Raises UserError if a run's examples or caches have changed since it read `read` batches."""
    differences = task_record.changes(load_record(model_dir), data.record, read)
    if differences:
        raise UserError(
            f"{model_dir} was trained on different examples ({'; '.join(differences)}): use "
            "the task module, caches and version of this project that it was trained with"
        )
    fingerprints = metadata.newest(model_dir)[1].get("cache_fingerprints", {})
    for task in data.tasks:
        own = task.manifest.plan.fingerprint
        if fingerprints.get(task.task.name, own) != own:
            raise UserError(
                f"{task.cache} has changed since {model_dir} was trained on it, perhaps by "
                "a takedown: set --cache_dir to an earlier copy, or use --document, which "
                "still works"
            )
