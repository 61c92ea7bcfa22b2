"""What came of a run: a table, a picture of the loss curve, and what to try next.

python -m trainer.report --model_dir=DIR [--picture=FILE.png]
"""

import sys
from typing import Any

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError
from trainer.reporting.metrics import read_metrics


def drawing() -> Any:
    """Returns matplotlib's pyplot, for files alone.

    Raises:
      UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(lines: list[dict], picture: str, title: str) -> None:
    """Writes a PNG of training and validation loss against steps.

    Raises:
      UserError: matplotlib is not installed.
    """
    pyplot = drawing()
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


def _last(lines: list[dict], split: str) -> dict:
    found = [line for line in lines if line["split"] == split]
    if not found:
        raise UserError(f"the run has no {split} metrics yet: let it train on")
    return found[-1]


def summary(config, lines: list[dict]) -> str:
    """The run in a few lines."""
    train, validation = _last(lines, "train"), _last(lines, "validation")
    result = validation["metrics"]
    speed = train.get("speed", {})
    rows = [
        ("preset", config.preset),
        ("task", config.task),
        ("steps", f"{validation['step']:,}"),
        ("training loss", f"{train['metrics']['loss']:.3f}"),
        ("validation loss", f"{result['loss']:.3f} nats a token"),
        ("perplexity", f"{result['perplexity']:.1f}"),
        ("token accuracy", f"{result['accuracy']:.1%}"),
        (
            "unigram entropy",
            f"{result['unigram_entropy']:.3f} nats, "
            f"{result['unigram_entropy'] - result['loss']:.3f} above the loss",
        ),
    ]
    if "bits_per_byte" in result:
        rows.append(("bits a byte", f"{result['bits_per_byte']:.4f} of the validation text"))
    if "skipped_updates" in train["metrics"]:
        rows.append(
            ("left out", f"{train['metrics']['skipped_updates']:,} updates (--on_nan=skip)")
        )
    if "tokens_per_second" in speed:
        rate = f"{speed['tokens_per_second']:,.0f} positions/s"
        if "mfu" in speed:
            rate += f", {speed['mfu']:.1%} of the peak (MFU)"
        rows.append(("speed", rate))
    blocked = _blocked(lines)
    if blocked:
        rows.append(("checkpoints", blocked))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _blocked(lines: list[dict]) -> str:
    """How long training stood still for checkpoints, and what share of the time that is."""
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
    return f"training stood still for {blocked:.2f} s, {blocked / seconds:.2%} of its time"


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m trainer.report", description="Summarises a run.")
    parser.add_argument("--model_dir", required=True, help="where trainer.pretrain wrote")
    parser.add_argument("--picture", help="PNG to write (default: loss_curve.png in model_dir)")
    arguments = parser.parse_args(argv)

    from trainer.config import load_config

    config, _ = load_config(arguments.model_dir)
    lines = read_metrics(arguments.model_dir)
    text = summary(config, lines)
    picture = arguments.picture or files.join(arguments.model_dir, "loss_curve.png")
    draw(lines, picture, f"{config.preset} on {config.task}")
    longer = 2 * config.train_steps
    print(f"""{text}

loss curve   {picture}
checkpoints  {arguments.model_dir}/checkpoint_STEP

Next:
  train on            python -m trainer.pretrain … --train_steps={longer}
  every checkpoint    python -m trainer.evaluate --model_dir={arguments.model_dir} --checkpoints=all
  watch               tensorboard --logdir={arguments.model_dir}/tensorboard
  your own text       python -m vocab.train --corpus='parquet:DATA/*.parquet' --output=DIR
  all settings        python -m trainer.pretrain --help""")


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
