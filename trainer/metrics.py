"""Where numbers go: JSON lines and TensorBoard."""

import json
import math
from typing import Any

from tasks import files

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes `metrics.jsonl`, one object a line, and TensorBoard events beside it.

    A line is {"step", "split", "metrics": {...}} and, for training, "speed": {...}; everything but
    "speed" is a function of the configuration. Lines of steps after `resume_step`, left by a run
    that was killed, are removed first.
    """

    def __init__(self, model_dir: str, resume_step: int, tensorboard: bool):
        self._path = files.join(model_dir, METRICS_FILE)
        self._lines = [line for line in read_metrics(model_dir) if line["step"] <= resume_step]
        self._local = not files.is_remote(model_dir)
        self._rewrite()
        self._boards: dict[str, Any] = {}
        self._board_folder = (
            files.join(files.local_path(model_dir), "tensorboard")
            if tensorboard and self._local
            else None
        )
        self._resume_step = resume_step

    def write(
        self,
        step: int,
        split: str,
        metrics: dict[str, float],
        speed: dict[str, float] | None = None,
    ) -> None:
        """Appends the metrics of a split after `step` updates."""
        line: dict[str, Any] = {"step": step, "split": split, "metrics": metrics}
        if speed is not None:
            line["speed"] = speed
        self._lines.append(line)
        if self._local:
            with open(files.local_path(self._path), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        else:
            self._rewrite()
        if self._board_folder:
            board = self._board(split)
            for name, value in {**metrics, **(speed or {})}.items():
                board.add_scalar(name, value, step)
            board.flush()

    def close(self) -> None:
        """Closes the TensorBoard files."""
        for board in self._boards.values():
            board.close()

    def _rewrite(self) -> None:
        text = "".join(json.dumps(line) + "\n" for line in self._lines)
        files.write_bytes(self._path, text.encode())

    def _board(self, split: str) -> Any:
        if split not in self._boards:
            from tensorboardX import SummaryWriter

            self._boards[split] = SummaryWriter(
                f"{self._board_folder}/{split}", purge_step=self._resume_step + 1
            )
        return self._boards[split]


def read_metrics(model_dir: str) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl; a line cut short by a kill is left out."""
    path = files.join(model_dir, METRICS_FILE)
    if not files.exists(path):
        return []
    lines = []
    for text in files.read_bytes(path).decode(errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def means(metrics: dict[str, tuple[Any, Any]]) -> dict[str, float]:
    """(sum, weight) -> sum / weight, as Python floats; waits for the device."""
    return {
        name: float(total) / max(float(weight), 1e-30) for name, (total, weight) in metrics.items()
    }


def perplexity(loss: float) -> float:
    """exp(loss), infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
