"""A run's configuration from flags: a preset, then `--field.path=value`."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from tasks import annexes, registry
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, field
from tasks.terminal.flags import Given, groups_of_annexes, parse
from tasks.terminal.table import table
from trainer.config import field_paths, from_transformers
from trainer.config.optimizer import OPTIMIZER_PRESETS, recipe
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.config.run import BRANCH, Config
from trainer.config.stored import CONFIG_FILE, load_config, stored_model
from trainer.config.unused_fields import refuse_unread
from trainer.model.config import ModelConfig
from trainer.model.registry import SLOTS, STACK_PARTS

# The origin of fields that the user has set.
_TYPED = "command line"
# The preset whose values --help shows as defaults.
_SHOWN = "t5_1_1_small"


def _presets() -> str:
    """Returns a table of the models for --preset, by family, with their sizes."""
    families: dict[str, list[str]] = {}
    for name, model in MODEL_PRESETS.items():
        families.setdefault(f"{model.family} ({model.architecture})", []).append(name)
    header = ("  --preset", "emb_dim", "heads", "head_dim", "mlp_dim", "vocabulary", "layers")
    return "\n\n".join(
        f"{family}\n{table(header, [_sizes(name) for name in names])}"
        for family, names in families.items()
    )


def _parts() -> str:
    """Returns the parts that model fields can name, with their options, defaults and help."""
    lines = []
    for slot, known in {**SLOTS, STACK_PARTS.field: STACK_PARTS}.items():
        lines.append(f"--model.{slot}=NAME or NAME:OPTION=VALUE,OPTION=VALUE")
        for name, part in known.items():
            lines.append(f"  {name}")
            for each in dataclasses.fields(part.options):
                default = "" if each.default is None else f" (default: {each.default})"
                text = f"{each.name}: {each.metadata['words']}{default}"
                lines += textwrap.wrap(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
        lines.append("")
    return "\n".join(lines).rstrip()


def _sizes(name: str) -> tuple[object, ...]:
    model = MODEL_PRESETS[name]
    stacks = (model.num_encoder_layers, model.num_decoder_layers)
    layers = " + ".join(str(number) for number in stacks if number)
    widths = (model.emb_dim, model.num_heads, model.head_dim, model.mlp_dim, model.vocab_size)
    return (f"  {name}", *widths, layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags that configure a run: one for each field of `Config`, and recipes."""

    ANNEXES: ClassVar[str] = ""

    run: Given = field(REQUIRED, "The run as a whole", flat=True, partial=Config)
    optimizer_preset: str | None = field(
        None,
        "published recipe of optimizer, schedule and loss, which other flags override: "
        f"{', '.join(OPTIMIZER_PRESETS)}",
        metavar="NAME",
        often="recipe, such as t5x_finetune (--help=all)",
    )
    print_config: str | None = field(
        None,
        "print every field with its value and origin, then exit; words: also with its help",
        choices=("values", "words"),
        alone="values",
        often="print all fields with origins, and exit",
    )

    @staticmethod
    def help_topics() -> dict[str, Callable[[], str]]:
        """Returns name -> function that makes the text of --help=NAME."""
        return {"presets": _presets, "parts": _parts}

    @staticmethod
    def help_defaults() -> dict[str, Any]:
        """Returns flag path -> the default shown by --help."""
        config = Config(_SHOWN, MODEL_PRESETS[_SHOWN])
        return {
            f"run.{path}": value for path, value in field_paths.leaves(config) if path != "preset"
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRunFlags(RunFlags):
    """Flags that configure a run, with those of annexes that can configure one instead."""

    ANNEXES: ClassVar[str] = "run_flags"


class Settings(NamedTuple):
    """Values that a command sets before its flags; `model` replaces the preset's."""

    origin: str
    values: dict[str, Any]
    model: ModelConfig | None = None


def given(flags: Sequence[str]) -> Given:
    """Returns the parsed flags of a run; raises a UserError if one is unknown or invalid."""
    return parse(RunFlags, flags).below("run")


def build_config(
    preset: str,
    overrides: Sequence[str] | Given,
    optimizer_preset: str | None = None,
    settings: Settings | None = None,
) -> tuple[Config, dict[str, str]]:
    """Returns (the configuration, field path -> origin).

    Applies the model `preset`, a command's `settings`, the recipe `optimizer_preset`, then the
    flags in `overrides`.
    """
    overrides = parsed(overrides)
    if settings and settings.model:
        model, origin = settings.model, f"the run {preset}"
    else:
        from_folder = from_transformers.is_folder(preset)
        model = from_transformers.folder_model(overrides) if from_folder else model_preset(preset)
        origin = f"preset {preset}"
    config = Config(preset=preset, model=model)
    origins = {path: origin for path, _ in field_paths.leaves(config) if path.startswith("model.")}
    origins["preset"] = _TYPED
    if settings:
        config = field_paths.implied(config, origins, settings.values, settings.origin)
    if optimizer_preset is not None:
        by = f"optimizer preset {optimizer_preset}"
        config = field_paths.implied(config, origins, recipe(optimizer_preset), by)
    return field_paths.override(config, origins, overrides), origins


def parsed(overrides: Sequence[str] | Given) -> Given:
    """Returns the parsed flags; imports --task_module, which may register values for others."""
    if not isinstance(overrides, Given):
        overrides = given(overrides)
    if (module := overrides.values.get("task_module")) is not None:
        registry.load(module)
    return overrides


def configured(flags: RunFlags, settings: Settings | None = None) -> tuple[Config, dict[str, str]]:
    """Returns (a command's configuration, field path -> origin).

    An annex with flags, a group of `flags`, makes it if they are given, and may print notes.
    """
    by_annexes = (group.configured(flags) for group in groups_of_annexes(flags))
    found = next((made for made in by_annexes if made), None)
    config, origins = found or _of_preset(flags, settings)
    refuse_unread(config, origins)
    return config, origins


def _of_preset(flags: RunFlags, settings: Settings | None) -> tuple[Config, dict[str, str]]:
    """Returns the configuration of --preset, or of the model that another flag names."""
    preset = flags.run.values.get("preset")
    if flags.run.values.get("branch_from"):
        preset, settings = _of_branch(flags.run, settings)
    preset = preset or from_transformers.named_folder(flags.run)
    source = flags.run.values.get("init_from") or ""
    theirs = from_transformers.is_of_transformers(source)
    if not preset and source and not theirs:
        settings = settings or Settings("", {})
        settings = settings._replace(model=model_of_run(source, flags.run.values.get("model_dir")))
        preset = flags.run.values["preset"] = source
    if not preset:
        others = (each.INSTEAD_OF_PRESET for each in annexes.every(OpenRunFlags.ANNEXES))
        hint = f" (did you mean --init_from=hf:{source}?)" if theirs else ""
        raise UserError(f"{' or '.join(['--preset', *others])} is missing{hint}")
    config, origins = build_config(preset, flags.run, flags.optimizer_preset, settings)
    return from_transformers.adopt_model(config, origins), origins


# What a branch does not take from its run: places, its beginning, and what is of a machine.
_NOT_OF_BRANCH = (
    *("preset", "model.", "model_dir", "init_from", "branch_from", "rewind_to", "profile_steps"),
    *("processes.", "metrics.wandb", "on_event"),
)


def _of_branch(run: Given, settings: Settings | None) -> tuple[str, Settings]:
    """Returns (the preset, the settings) of the run that --branch_from names.

    A branch that has begun has a record of them, so that it no longer needs that run.
    """
    wanted, own = run.values["branch_from"], run.values.get("model_dir")
    if settings:
        raise UserError("--branch_from is for pretrain, which goes on with its run's settings")
    if not BRANCH.holds(wanted):
        raise UserError(f"--branch_from={wanted}: it must be {BRANCH.words}")
    folder = wanted.rpartition("@")[0]
    if own is not None and files.exists(files.join(own, CONFIG_FILE)):
        begun = load_config(own)[0].branch_from == wanted
        folder = own if begun else folder
    config, _ = load_config(folder)
    if run.values.get("preset") not in (None, config.preset):
        raise UserError(
            f"--preset={run.values['preset']}: the run in {folder} has {config.preset}, which a "
            "branch keeps: leave the flag out"
        )
    run.values["preset"] = config.preset
    unset = dict(field_paths.leaves(Config(config.preset, config.model)))
    values = {
        path: value
        for path, value in field_paths.leaves(config)
        if not path.startswith(_NOT_OF_BRANCH) and value != unset[path]
    }
    return config.preset, Settings(f"the run {folder}", values, config.model)


def origins_of(config: Config) -> dict[str, str]:
    """Returns field path -> origin for a configuration made by code, as if flags had set it.

    Raises UserError if it sets a field that has no effect.
    """
    model = MODEL_PRESETS.get(config.preset)
    known = dict(field_paths.leaves(Config(config.preset, model))) if model else {}
    origins = {"preset": _TYPED}
    for path, value in field_paths.leaves(config):
        if path not in known or value != known[path]:
            origins[path] = _TYPED
        elif path.startswith("model."):
            origins[path] = f"preset {config.preset}"
    refuse_unread(config, origins)
    return origins


def model_of_run(source: str, own: str | None) -> ModelConfig:
    """Returns the model of one of our runs, given by its folder or a checkpoint.

    On resuming, the record in `own`, the folder of the run that started from it, suffices.
    """
    folder = source.rstrip("/")
    for path in (folder, re.sub(r"/checkpoint_\d+$", "", folder), *([own] if own else ())):
        config = files.join(path, CONFIG_FILE)
        if files.exists(config):
            stored = files.read_json(config)
            if "config" in stored and "model" in stored["config"]:
                if module := stored["config"].get("task_module"):  # may register parts of models
                    registry.load(module)
                return stored_model(stored["config"]["model"], config)
    raise UserError(
        f"--init_from={source} is not a run of this trainer (it has no {CONFIG_FILE}): pass its "
        "--preset, or hf:DIR for a transformers model"
    )
