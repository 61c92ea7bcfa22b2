"""Summarises a run: a table, a picture of the loss curve, and what to try next.

python -m trainer.report --model_dir=DIR [--output=FILE.png]
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError
from tasks.terminal.table import table

if TYPE_CHECKING:
    from trainer.config import Config

_Line = dict[str, Any]  # of metrics.jsonl


def draw(lines: list[_Line], picture: str, title: str) -> None:
    """Writes a PNG of training and validation loss against steps.

    Args:
      lines: the lines of metrics.jsonl.
      picture: file to write, local or remote.
      title: title of the picture.

    Raises:
      UserError: matplotlib is not installed, or the run has no validation metrics yet.
    """
    from trainer.reporting.drawing import load_pyplot

    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for split, color in (("train", "#8fb3d9"), ("validation", "#c1440e")):
        points = [
            (line["step"], line["metrics"]["loss"]) for line in lines if line["split"] == split
        ]
        marker = "o" if split == "validation" else ""
        axes.plot(*zip(*points, strict=True), marker=marker, color=color, label=f"{split} loss")
    baseline = _last(lines, "validation")["metrics"]["unigram_entropy"]
    axes.axhline(
        baseline,
        linestyle="--",
        color="#777777",
        linewidth=1,
        label="unigram entropy of the targets",
    )
    axes.set(xlabel="step", ylabel="nats per target token", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    with files.atomic_write(picture) as file:
        # Without metadata, so that equal curves give equal files.
        figure.savefig(file, format="png", metadata={"Software": None})
    pyplot.close(figure)


def _last(lines: list[_Line], split: str) -> _Line:
    found = [line for line in lines if line["split"] == split]
    if not found:
        advice = "let it train longer"
        if split == "validation":
            advice += ", with an --evaluation.every_steps above 0"
        raise UserError(f"the run has no {split} metrics yet: {advice}")
    return found[-1]


def summary(config: Config, lines: list[_Line]) -> str:
    """Returns a table of the run's results so far.

    Raises:
      UserError: the run has no training or validation metrics yet.
    """
    train, validation = _last(lines, "train"), _last(lines, "validation")
    result, entropy = validation["metrics"], validation["metrics"]["unigram_entropy"]
    rows = [
        ("steps", f"{validation['step']:,}"),
        ("training loss", f"{train['metrics']['loss']:.3f}"),
        ("validation loss", f"{result['loss']:.3f} nats per token"),
        ("perplexity", f"{result['perplexity']:.1f}"),
        ("token accuracy", f"{result['accuracy']:.1%}"),
        ("unigram entropy", f"{entropy:.3f} nats, {_distance(entropy - result['loss'])} the loss"),
    ]
    if "bits_per_byte" in result:
        rows.append(("bits per byte", f"{result['bits_per_byte']:.4f} of the validation text"))
    if "skipped_updates" in train["metrics"]:
        skipped = train["metrics"]["skipped_updates"]
        rows.append(("skipped", f"{skipped:,} updates (--on_nan=skip)"))
    speed = train.get("speed", {})
    if "tokens_per_second" in speed:
        rate = f"{speed['tokens_per_second']:,.0f} positions/s"
        if "mfu" in speed:
            rate += f", {speed['mfu']:.1%} of the peak (MFU)"
        rows.append(("speed", rate))
    if blocked := _blocked(lines):
        rows.append(("checkpoints", blocked))
    return table(("run", f"{config.preset} on {config.task}"), rows)


def _distance(difference: float) -> str:
    """Returns a difference in words, as in "0.250 above"."""
    return f"{abs(difference):.3f} {'above' if difference >= 0 else 'below'}"


def _blocked(lines: list[_Line]) -> str:
    """Returns how long checkpoints blocked training, and their share of its time; "" if never."""
    blocked, seconds, before = 0.0, 0.0, None
    for line in lines:
        if line["split"] != "train":
            continue
        speed = line.get("speed", {})
        if before is not None and "steps_per_second" in speed:
            seconds += (line["step"] - before) / speed["steps_per_second"]
            blocked += speed.get("checkpoint_blocking_seconds", 0.0)
        before = line["step"]
    if not blocked:
        return ""
    return f"blocked training for {blocked:.2f} s, {blocked / seconds:.2%} of its time"


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m trainer.report", description=__doc__.splitlines()[0])
    parser.add_argument("--model_dir", required=True, help="folder of the run, local or remote")
    parser.add_argument(
        "--output",
        "--picture",
        help="PNG of the loss curve to write; MODEL_DIR/loss_curve.png if left out",
    )
    arguments = parser.parse_args(argv)

    from trainer.config import load_config
    from trainer.reporting.metrics import read_metrics

    config, _ = load_config(arguments.model_dir)
    lines = read_metrics(arguments.model_dir)
    text = summary(config, lines)
    picture = arguments.output or files.join(arguments.model_dir, "loss_curve.png")
    draw(lines, picture, f"{config.preset} on {config.task}")
    longer = 2 * config.train_steps
    run = f"--model_dir={arguments.model_dir}"
    logs = f"--logdir={files.join(arguments.model_dir, 'tensorboard')}"
    print(f"""{text}

loss curve   {picture}
checkpoints  {arguments.model_dir}/checkpoint_STEP

Next:
  train longer          run the same command of trainer.pretrain with --train_steps={longer}
  compare checkpoints   python -m trainer.evaluate {shlex.quote(run)} --steps=all
  watch the run         tensorboard {shlex.quote(logs)}
  use your own text     python -m vocab.train --corpus='parquet:DATA/*.parquet' --output=DIR
  see all settings      python -m trainer.pretrain --help""")


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
