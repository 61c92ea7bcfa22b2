"""`python -m trainer.pretrain --help`: every field of a configuration as a flag, by group.

--help=presets lists models, and --help=parts the parts of models with their options.
"""

import argparse
import dataclasses
import textwrap
import types
import typing
from typing import Any

from tasks.terminal.command_line import Parser, UserError, nearest
from tasks.terminal.table import table
from trainer.config import fields
from trainer.config.presets import MODEL_PRESETS
from trainer.config.run import Config
from trainer.model.parts import SLOTS

# The fields of a run that are in no group of their own.
RUN = "run"
PRESETS, PARTS = "presets", "parts"
# The preset whose values are shown as defaults.
_SHOWN = "t5_1_1_small"
# Longer lists of choices would not fit beside their flag; their words name them.
_LONGEST_METAVAR = 50
_METAVARS = {bool: "true|false", int: "N", float: "X", str: "TEXT", tuple: "A,B"}


class HelpAction(argparse.Action):
    """The flags --help, --help=GROUP, --help=presets and --help=parts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values == PRESETS:
            print(presets())
        elif values == PARTS:
            print(parts())
        elif values is None:
            for group in groups():
                _add_group(parser, group)
            parser.print_help()
        elif values in groups():
            only = Parser(prog=parser.prog, usage=argparse.SUPPRESS, add_help=False)
            _add_group(only, values)
            print(only.format_help(), end="")
        else:
            known = [PRESETS, PARTS, *groups()]
            raise UserError(
                f"--help={values}: no such group{nearest(values, known)}; there are "
                f"{', '.join(known)}"
            )
        parser.exit()


def groups() -> dict[str, str]:
    """Returns name -> title of the groups of fields, in the order of `Config`."""
    nested = {
        field.name: field.metadata["words"]
        for field in dataclasses.fields(Config)
        if field.name in _nested()
    }
    return {RUN: "The run as a whole", **nested}


def presets() -> str:
    """Returns a table of the models that --preset names, by family, with their sizes."""
    families: dict[str, list[str]] = {}
    for name, model in MODEL_PRESETS.items():
        families.setdefault(f"{model.family} ({model.architecture})", []).append(name)
    header = ("  --preset", "emb_dim", "heads", "head_dim", "mlp_dim", "vocabulary", "layers")
    return "\n\n".join(
        f"{family}\n{table(header, [_sizes(name) for name in names])}"
        for family, names in families.items()
    )


def parts() -> str:
    """Returns the parts that fields of a model name, with their options, defaults and words."""
    lines = []
    for slot, known in SLOTS.items():
        lines.append(f"--model.{slot}=NAME or NAME:OPTION=VALUE,OPTION=VALUE")
        for name, part in known.items():
            lines.append(f"  {name}")
            for each in dataclasses.fields(part.options):
                default = "" if each.default is None else f" (default: {each.default})"
                text = f"{each.name}: {each.metadata['words']}{default}"
                lines += textwrap.wrap(
                    text, 96, initial_indent="    ", subsequent_indent="        "
                )
        lines.append("")
    return "\n".join(lines).rstrip()


def _sizes(name: str) -> tuple[object, ...]:
    model = MODEL_PRESETS[name]
    stacks = (model.num_encoder_layers, model.num_decoder_layers)
    layers = " + ".join(str(number) for number in stacks if number)
    widths = (model.emb_dim, model.num_heads, model.head_dim, model.mlp_dim, model.vocab_size)
    return (f"  {name}", *widths, layers)


def _nested() -> dict[str, type]:
    hints = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if hasattr(kind, "__dataclass_fields__")}


def _add_group(parser: argparse.ArgumentParser, group: str) -> None:
    config = Config(preset=_SHOWN, model=MODEL_PRESETS[_SHOWN])
    shown = f"; defaults are those of {_SHOWN}" if group == "model" else ""
    added = parser.add_argument_group(group, groups()[group] + shown)
    for path, value in fields.leaves(config):
        if (path.partition(".")[0] if "." in path else RUN) == group and path != "preset":
            _add_field(added, config, path, value)


def _add_field(group: Any, config: Config, path: str, value: Any) -> None:
    metadata = fields.metadata(config, path)
    former = [name for name, now in fields.former_names(config).items() if now == path]
    names = ",".join(map(str, metadata.get("choices", ())))
    choices = f"{{{names}}}" if names else ""
    if len(choices) > _LONGEST_METAVAR:
        choices = "NAME"
    group.add_argument(
        *(f"--{name}" for name in (path, *former)),
        metavar=choices or _METAVARS[_kind(fields.field_type(config, path))],
        default=None if value in (None, "", ()) else fields.as_flag(value),
        help=metadata.get("words", "").replace("%", "%%"),
    )


def _kind(declared: Any) -> type:
    """Returns the plain type of a declared one: int of `int | None`, tuple of `tuple[str, ...]`."""
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return _kind(next(kind for kind in typing.get_args(declared) if kind is not type(None)))
    return typing.get_origin(declared) or declared
