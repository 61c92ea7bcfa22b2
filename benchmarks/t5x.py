"""Starts T5X's processes. T5X is not imported here, nor is JAX when this module is."""

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.config import Config


def sizes(config: Config, inputs: int, targets: int) -> dict[str, Any]:
    """Returns the model and batch of a configuration, as T5X's processes read them.

    Raises:
      UserError: T5X has no such model or optimizer.
    """
    from trainer.model.spec import model_spec

    model = config.model
    if model.architecture == "encoder" or config.optimizer.name != "adafactor":
        raise UserError("--t5x: T5X has no encoder-only models, and only its Adafactor is compared")
    spec = model_spec(model)
    return {
        "decoder_only": model.architecture == "decoder",
        "network": {
            "vocab_size": model.vocab_size,
            "dtype": model.dtype,
            "emb_dim": model.emb_dim,
            "num_heads": model.num_heads,
            "head_dim": model.head_dim,
            "mlp_dim": model.mlp_dim,
            "num_encoder_layers": model.num_encoder_layers,
            "num_decoder_layers": model.num_decoder_layers,
            "mlp_activations": spec.decoder.layers[0].feed_forward.activations,
            "logits_via_embedding": spec.output.tied,
            "dropout_rate": model.dropout_rate,
        },
        "microbatches": config.microbatches,
        "batch_size": config.batch_size,
        "inputs": inputs,
        "targets": targets,
    }


def start(
    module: str,
    argument: dict[str, Any],
    sources: str,
    python: str,
    environment: Mapping[str, str] = os.environ,
) -> subprocess.Popen:
    """Starts a module of benchmarks that imports T5X, with pipes to its stdin and stdout.

    Args:
      module: as "t5x_step".
      argument: given to it as JSON.
      sources: T5X's source folders, separated by colons.
      python: interpreter with T5X's dependencies.
      environment: of the process, to which the sources are added.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # What this process finds by PYTHONPATH, as libtpu, is found there, too.
    others = [each for each in environment.get("PYTHONPATH", "").split(":") if each]
    paths = [os.path.abspath(path) for path in (*sources.split(":"), root, *others)]
    return subprocess.Popen(
        [python, "-m", f"benchmarks.{module}", json.dumps(argument)],
        env={**environment, "PYTHONPATH": ":".join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
