"""Flags that name gin files, and the flags of T5X and Mesh T5 beside them."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field
from tasks.terminal.flags import Given, names_of, refuse_unknown
from trainer.config import field_paths
from trainer.config.from_flags import RunFlags, parsed
from trainer.config.run import Config

# Flags that T5X and Mesh T5 take beside gin files -> what replaces them here.
_FOREIGN = {
    "alsologtostderr": "messages go to stderr",
    "logtostderr": "messages go to stderr",
    "gcp_project": "training runs on the machine of this command",
    "initialization_timeout": "see --processes.timeout_seconds",
    "module_import": "nothing is imported; --task_module names a module with more tasks",
    "multiprocess_gpu": "see --processes.coordinator",
    "project_dirs": "nothing is imported; --gin_search_paths has folders of gin files",
    "seqio_additional_cache_dirs": "the data are in a cache, --cache_dir",
    "t5_tfds_data_dir": "the data are in a cache, --cache_dir",
    "tfds_data_dir": "the data are in a cache, --cache_dir",
    "tpu": "training runs on the machine of this command",
    "tpu_zone": "training runs on the machine of this command",
}
_SWITCHES = ("alsologtostderr", "logtostderr", "multiprocess_gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gin:
    """Gin files of T5X and Mesh T5: read, never executed (docs/migrating_from_t5x.md)."""

    INSTEAD_OF_PRESET: ClassVar[str] = "--gin_file"

    gin_file: tuple[str, ...] = field(
        (),
        "gin file to read; may be repeated, later files override earlier ones",
        metavar="FILE",
        repeated=True,
        often="gin file of T5X or Mesh T5",
    )
    gin_search_paths: tuple[str, ...] = field(
        (),
        "folders to search for gin files and their includes",
        metavar="DIR,DIR",
        repeated=True,
        aliases=("gin_location_prefix",),
    )
    gin_param: tuple[str, ...] = field(
        (),
        "binding that overrides the files; same as T5X's --gin.NAME=VALUE",
        metavar="NAME=VALUE",
        repeated=True,
        aliases=("gin_bindings", "gin.*"),
    )
    others: tuple[str, ...] = field((), "flags of T5X and Mesh T5", rest=refuse_unknown)

    def configured(self, flags: RunFlags) -> tuple[Config, dict[str, str]] | None:
        """Returns (the configuration, field path -> origin) and prints notes about the files.

        Returns None without files.
        """
        others = _without_foreign(self.others) if self.gin_file else self.others
        refuse_unknown(others, names_of(flags))
        if not self.gin_file:
            if self.gin_param:
                raise UserError(f"--gin.{self.gin_param[0]} needs a --gin_file")
            return None
        if flags.run.values.get("branch_from"):
            raise UserError("--branch_from begins with its run's settings: leave out --gin_file")
        if flags.optimizer_preset:
            raise UserError("--optimizer_preset and --gin_file both name an optimizer: omit one")
        field_paths.refuse_two_values(self.gin_param, "gin.")
        folders = [path for paths in self.gin_search_paths for path in paths.split(",")]
        preset = flags.run.values.get("preset")
        config, origins, notes = build(self.gin_file, folders, self.gin_param, preset, flags.run)
        for subject, text in notes:
            print(f"{subject}: {text}", flush=True)
        return config, origins


def build(
    gin_files: Sequence[str],
    search_paths: Sequence[str],
    bindings: Sequence[str],
    preset: str | None,
    overrides: Sequence[str] | Given,
) -> tuple[Config, dict[str, str], list[tuple[str, str]]]:
    """Returns (the configuration, field path -> origin, (subject, text) lines to print)."""
    from trainer.annexes.gin import recipe

    overrides = parsed(overrides)
    typed = list(overrides.typed.values())
    config, origins, notes = recipe.load(gin_files, search_paths, bindings, preset, typed)
    return field_paths.override(config, origins, overrides), origins, notes


def _without_foreign(words: Sequence[str]) -> list[str]:
    """Drops the flags of T5X and Mesh T5 that mean nothing here; prints each."""
    kept, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.removeprefix("--").partition("=")
        if name not in _FOREIGN:
            kept.append(word)
            continue
        print(f"read, no counterpart: --{name}: {_FOREIGN[name]}", flush=True)
        if not equals and name not in _SWITCHES:
            next(rest, None)
    return kept
