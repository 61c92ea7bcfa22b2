"""Starts the processes that run or compile T5X's step; neither T5X nor JAX is imported here."""

import json
import os
import pathlib
import subprocess
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.config import Config


def sizes(config: Config, inputs: int, targets: int) -> dict[str, Any]:
    """Returns the model and batch for T5X's process; raises UserError for models that T5X lacks."""
    from trainer.model.spec import model_spec

    model = config.model
    if not model.has_decoder or config.optimizer.name != "adafactor":
        raise UserError("--t5x: T5X has no encoder-only models, and only its Adafactor is compared")
    spec = model_spec(model)
    same = (
        *("vocab_size", "dtype", "emb_dim", "num_heads", "head_dim", "mlp_dim"),
        *("num_encoder_layers", "num_decoder_layers", "dropout_rate"),
    )
    return {
        "decoder_only": not model.has_encoder,
        "network": {
            **{name: getattr(model, name) for name in same},
            "mlp_activations": spec.decoder.layers[0].feed_forward.activations,
            "logits_via_embedding": spec.output.tied,
        },
        "microbatches": config.microbatches,
        "batch_size": config.batch_size,
        "inputs": inputs,
        "targets": targets,
    }


def start(module: str, argument: dict[str, Any], sources: str, python: str) -> subprocess.Popen:
    """Starts a module of benchmarks that imports T5X, with pipes to its stdin and stdout.

    `argument` is given to it as JSON. `sources` are T5X's source folders, separated by colons, and
    `python` an interpreter with T5X's dependencies.
    """
    # What this process finds through PYTHONPATH, such as libtpu, is found there, too.
    others = [word for word in os.environ.get("PYTHONPATH", "").split(":") if word]
    root = str(pathlib.Path(__file__).parents[1])
    paths = [os.path.abspath(path) for path in (*sources.split(":"), root, *others)]
    return subprocess.Popen(
        [python, "-m", f"benchmarks.{module}", json.dumps(argument)],
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
