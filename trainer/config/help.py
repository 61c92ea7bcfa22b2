"""--help topics of commands that configure a run: models, and their parts."""

import dataclasses
import textwrap

from tasks.terminal.table import table
from trainer.config.presets import MODEL_PRESETS
from trainer.model.parts import SLOTS


def presets() -> str:
    """Returns a table of the models for --preset, by family, with their sizes."""
    families: dict[str, list[str]] = {}
    for name, model in MODEL_PRESETS.items():
        families.setdefault(f"{model.family} ({model.architecture})", []).append(name)
    header = ("  --preset", "emb_dim", "heads", "head_dim", "mlp_dim", "vocabulary", "layers")
    return "\n\n".join(
        f"{family}\n{table(header, [_sizes(name) for name in names])}"
        for family, names in families.items()
    )


def parts() -> str:
    """Returns the parts that model fields name, with their options, defaults and help."""
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
