"""Writes metrics to JSON lines, TensorBoard and, if configured, Weights & Biases."""

import dataclasses
import hashlib
import json
import sys
import uuid
from typing import Any

from tasks.storage import files
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from trainer.checkpoints.remote import Mirror
from trainer.config import Config

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.json"
WANDB_FILE = "wandb.json"
# Metrics that describe an evaluation's data, or its loss in other units.
OF_DATA = ("mean_label", "max_targets_length", "training_loss")
# The split under which training's norms are written.
NORMS = "norms"


class MetricsWriter:
    """Writes metrics to `metrics.jsonl`, TensorBoard events and Weights & Biases.

    A line of metrics.jsonl is {"step", "split", "metrics": {...}} and, for training, "speed": {...}
    with rates and memory; the configuration determines everything but "speed". Lines after
    `resume_step`, left by a killed run, are removed; so is that step's evaluation unless
    `evaluated`. If the lines before are not those of `digest`, it says so. In a remote model
    directory, files are replaced atomically, seconds later. Nothing is written unless `writing`.
    """

    def __init__(
        self,
        config: Config,
        resume_step: int,
        writing: bool = True,
        evaluated: bool = True,
        digest: str | None = None,  # the checkpoint's, from the method `digest`
    ):
        model_dir = config.model_dir
        self._writing = writing
        self._wandb: Any = None
        self._boards: dict[str, Any] = {}
        if not writing:
            return
        if config.metrics.wandb:
            self._wandb = _start_wandb(config)
        self._mirror = Mirror(model_dir) if files.is_remote(model_dir) else None
        folder = self._mirror.folder if self._mirror else files.local_path(model_dir)
        self._path = files.join(folder, METRICS_FILE)
        found = read_metrics(model_dir)
        kept = [
            line
            for line in found
            if _is_before(line, resume_step) or (line["step"] == resume_step and evaluated)
        ]
        if digest not in (None, _digest(found, resume_step)):
            print(
                f"{files.join(model_dir, METRICS_FILE)} has lost or changed lines up to step "
                f"{resume_step}: restore it from a copy, or go on with what is left",
                file=sys.stderr,
            )
        text = "".join(json.dumps(line) + "\n" for line in kept)
        files.write_bytes(self._path, text.encode())
        boards = files.join(folder, "tensorboard")
        self._board_folder = boards if config.metrics.tensorboard else None
        self._resume_step = resume_step
        self.flush()

    def write(
        self,
        step: int,
        split: str,
        metrics: dict[str, float],
        speed: dict[str, float] | None = None,
    ) -> None:
        """Appends the metrics of a split after `step` updates."""
        if not self._writing:
            return
        line: dict[str, Any] = {"step": step, "split": split, "metrics": metrics}
        if speed is not None:
            line["speed"] = speed
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except FileNotFoundError as error:
            raise UserError(
                f"{self._path}: the folder was moved or removed while this run wrote it: put it "
                "back and run the same command again"
            ) from error
        values = {**metrics, **(speed or {})}
        if self._board_folder:
            board = self._board(split)
            for name, value in values.items():
                board.add_scalar(name, value, step)
            board.flush()
        if self._mirror:
            self._mirror.begin()
        if self._wandb:
            self._wandb.log(
                {"step": step, **{f"{split}/{name}": value for name, value in values.items()}}
            )

    def digest(self, step: int) -> str | None:
        """Returns the SHA-256 of the lines up to `step` without its evaluation, to be kept."""
        if not self._writing:
            return None
        if not files.exists(self._path):
            print(f"{self._path} was removed while this run wrote it", file=sys.stderr)
            return None
        return _digest(_lines(self._path), step)

    def flush(self) -> None:
        """Waits until all lines are in a remote model_dir; call it before saving a checkpoint."""
        if self._writing and self._mirror:
            self._mirror.finish()

    def close(self) -> None:
        """Closes the TensorBoard files and finishes the Weights & Biases run."""
        for board in self._boards.values():
            board.close()
        self.flush()
        if self._wandb:
            self._wandb.finish()

    def _board(self, split: str) -> Any:
        if split not in self._boards:
            from tensorboardX import SummaryWriter

            self._boards[split] = SummaryWriter(
                f"{self._board_folder}/{split}", purge_step=self._resume_step + 1
            )
        return self._boards[split]


def _start_wandb(config: Config) -> Any:
    """Returns the model directory's Weights & Biases run; a resumed run continues it."""
    with extras.needed(f"--metrics.wandb={config.metrics.wandb}", "wandb"):
        import wandb
    path = files.join(config.model_dir, WANDB_FILE)
    if not files.exists(path):
        files.write_json(path, {"id": uuid.uuid4().hex[:16]})
    try:
        run = wandb.init(
            project=config.metrics.wandb,
            id=files.read_json(path)["id"],
            resume="allow",
            dir=None if files.is_remote(config.model_dir) else files.local_path(config.model_dir),
            config=dataclasses.asdict(config),
        )
    except wandb.Error as error:
        raise UserError(f"Weights & Biases does not start: {error}") from error
    # A resumed run repeats steps, which W&B rejects by default.
    run.define_metric("*", step_metric="step")
    return run


def _is_before(line: dict[str, Any], step: int) -> bool:
    """Returns whether a line is written before a checkpoint of `step`, evaluated or not."""
    return line["step"] < step or (line["step"] == step and line["split"] in ("train", NORMS))


def _digest(lines: list[dict[str, Any]], step: int) -> str:
    text = "".join(json.dumps(line) + "\n" for line in lines if _is_before(line, step))
    return hashlib.sha256(text.encode()).hexdigest()


def read_metrics(model_dir: str) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, except a last line that a kill cut short."""
    path = files.join(model_dir, METRICS_FILE)
    return _lines(path) if files.exists(path) else []


def _lines(path: str) -> list[dict[str, Any]]:
    lines = []
    texts = files.read_bytes(path).decode(errors="replace").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            kinds = {"step": int, "split": str, "metrics": dict}
            if not all(isinstance(line[name], kind) for name, kind in kinds.items()):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise UserError(
                f"{path} is damaged in line {number}: restore it from a copy, or delete the line"
            ) from error
        lines.append(line)
    return lines


def finite(value: Any) -> Any:
    """Returns JSON values with non-finite numbers replaced by strings."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
