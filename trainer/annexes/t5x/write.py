"""Writes checkpoints that T5X can restore, in Orbax's layout with T5X's tree.

Source: google-research/t5x, `checkpoints.OrbaxCheckpointManagerInterface` and `train_state.py`.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping

import numpy as np
import numpy.typing

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.annexes.t5x import layout
from trainer.checkpoints.layout import FactoredOver, Parts, adafactor_parts, moments, read_parts
from trainer.checkpoints.stored import Checkpoint
from trainer.checkpoints.tensors import held
from trainer.config import Config
from trainer.model.config import ModelConfig
from trainer.model.part_facts import T5X
from trainer.model.registry import PER_LAYER

# Families in T5X: t5_1_0 and t5_1_1 in `examples/t5` and, scanned, `examples/scalable_t5`; lm in
# `examples/decoder_only`.
_FAMILIES = ("t5_1_0", "t5_1_1", "lm")
_ACTIVATIONS = ("gelu", "linear", "relu", "silu")
# Fields that T5X's models share, or that do not affect the checkpoint.
_FIELDS = (
    *("family", "vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "dtype"),
    *("num_encoder_layers", "num_decoder_layers", "dropout_rate", "tied_logits"),
    *("mlp_activations", "scan_layers", "remat", "attention", "softmax_dtype"),
)


class OtherMoments(UserError):
    """T5X's Adafactor needs moments that the checkpoint does not have."""


def write(checkpoint: Checkpoint, config: Config, output: str, scanned: bool = False) -> str:
    """Writes one of our checkpoints atomically to `output/checkpoint_STEP` and returns that path.

    Adafactor's moments are 0 if another optimizer trained the model. `scanned` selects the layout
    of T5X's `scalable_t5`, which stacks all layers in one array and repeats the table of relative
    positions in each layer.
    """
    path = files.join(output, f"checkpoint_{checkpoint.step}")
    if files.exists(path):
        raise UserError(f"{path} exists: delete it, or use a different --output")
    least = config.optimizer.value("min_dim_size_to_factor") or layout.MIN_DIM_SIZE
    parameters = read_parts(checkpoint)
    return write_parts(parameters, checkpoint.step, config.model, output, scanned, least)


def write_parts(
    parameters: Mapping[str, Parts],
    step: int,
    model: ModelConfig,
    output: str,
    scanned: bool = False,
    least: int = layout.MIN_DIM_SIZE,
    dtype: np.typing.DTypeLike = np.float32,
) -> str:
    """Writes `output/checkpoint_STEP` atomically and returns its path.

    `parameters` are values and Adafactor's moments, layers unstacked; missing moments become 0.
    `least` is T5X's `min_dim_size_to_factor`, `dtype` the values' dtype; moments are float32.

    Raises:
      UserError: T5X does not support the model.
      OtherMoments: T5X factors a parameter differently.
    """
    if problems := unsupported(model):
        raise UserError("; ".join(problems))
    if scanned and not model.has_encoder:
        raise UserError("T5X does not scan decoder-only models: leave out --scan_layers")
    if not scanned and model.position == PER_LAYER:
        raise UserError(
            "T5X has a table of relative positions per layer only in scalable_t5, which stacks "
            "layers: add --scan_layers"
        )

    def factors(name: str, parts: Parts) -> FactoredOver:
        return layout.t5x_factors(name, parts["value"].shape, least, scanned)

    parameters = {
        name: _with_moments(name, parts, factors(name, parts)) for name, parts in parameters.items()
    }
    if scanned:
        parameters = layout.stack(parameters, model.num_heads)
    tree: dict[str, np.ndarray] = {"state/step": np.asarray(step, np.int32)}
    for name, parts in parameters.items():
        tree[f"target/{name}"] = parts["value"].whole().astype(dtype)
        for kind, tensor in moments(parts, factors(name, parts)).items():
            tree[f"state/param_states/{name}/{kind}"] = tensor.whole()
    _save(output, step, tree)
    return files.join(output, f"checkpoint_{step}")


def unsupported(model: ModelConfig) -> list[str]:
    """Returns one message per model setting that T5X does not support."""
    scalable = model.position == PER_LAYER and model.has_both_stacks
    plain = ModelConfig(**{name: getattr(model, name) for name in _FIELDS}).explicit()
    explicit = model.explicit()
    problems = [
        f"--model.{field.name}={getattr(model, field.name)}: T5X has no such setting"
        for field in dataclasses.fields(model)
        if field.name not in _FIELDS
        and getattr(model, field.name) != field.default
        and getattr(explicit, field.name) != getattr(plain, field.name)
        if field.name != "mixer" or T5X not in model.mixer_facts.exports
        if field.name != "position" or not scalable
        if field.name != "start_id"
    ]
    problems += [
        f"--model.mlp_activations: T5X has no {name}"
        for name in model.mlp_activations or ()
        if name not in _ACTIVATIONS
    ]
    if model.start_id:
        problems.append(f"--model.start_id={model.start_id}: T5X's decoders begin with id 0")
    if model.family not in _FAMILIES:
        problems.append(f"T5X has no {model.family} models, only {', '.join(_FAMILIES)}")
    return problems


def has_moments(checkpoint: Checkpoint) -> bool:
    """Returns whether the checkpoint has Adafactor's moments."""
    return any(name.partition("/")[2].startswith("v_row/") for name in checkpoint.state)


def _with_moments(name: str, parts: Parts, factors: FactoredOver) -> Parts:
    if set(parts) == {"value"}:
        parts = {**parts, "v": held(np.zeros(parts["value"].shape, np.float32))}
    kept, problem = adafactor_parts(name, parts, factors, momentum="m" in parts)
    if problem:
        raise OtherMoments(f"T5X factors {name} differently from this run: {problem}")
    return kept


def _save(output: str, step: int, tree: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp
    from flax import traverse_util

    # Orbax logs each error's traceback from a background thread before it raises the error.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    folder = output if files.is_remote(output) else os.path.abspath(files.local_path(output))
    files.make_folder(folder)
    with ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(step_prefix="checkpoint")
    ) as manager:
        nested = traverse_util.unflatten_dict(tree, sep="/")
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(nested)))
