"""The teacher of a run: `--teacher`, a model whose probabilities the run's model learns.

Its logits are a feature of each batch on the devices. It has the run's vocabulary; it may be of the
run's architecture, or a decoder that teaches an encoder-decoder: then it reads each example's
inputs and targets as one text.

Dimensions: B batch, S inputs, L targets, T = S + L, V vocabulary.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tasks.terminal.command_line import UserError
from trainer.annexes.distillation.loss import TEACHER_LOGITS
from trainer.annexes.distillation.options import DistillationConfig
from trainer.checkpoints import layout
from trainer.checkpoints.stored import Checkpoint, load
from trainer.checkpoints.tensors import Tensor, held
from trainer.config import from_transformers, stored_model
from trainer.data.run import Run
from trainer.engine import sharding
from trainer.engine.program import Program
from trainer.initialization import vocabularies
from trainer.initialization.init_from import fitted, placed
from trainer.model.config import ModelConfig
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import (
    Batch,
    build_model,
    init_params,
    logical_axes,
    rounded_kernels,
    run_model,
)

# Pairs of architectures, the teacher's first, whose batches fit each other.
_READS_ONE_TEXT = ("decoder", "encoder_decoder")


def features(run: Run, program: Program) -> Any:
    """Returns a function that adds the teacher's logits to a batch on the program's devices.

    Raises UserError if the teacher cannot teach the run's model.
    """
    settings: DistillationConfig = run.config.distillation  # type: ignore[attr-defined]
    name, student = str(settings.teacher), run.config.model
    flag = f"--teacher={name}"
    if run.config.phases.nest:
        raise UserError(
            f"--length_schedule cannot be combined with {flag}: leave out one of the two"
        )
    model, tensors, checkpoint = _opened(name)
    pair = model.architecture, student.architecture
    if pair[0] != pair[1] and pair != _READS_ONE_TEXT:
        raise UserError(f"{flag} is {pair[0]}-only, but the run's model {pair[1]}")
    if settings.prefix and pair != _READS_ONE_TEXT:
        raise UserError("--distillation.prefix has no effect: the teacher reads the run's batches")
    if model.vocab_size != student.vocab_size:
        raise UserError(
            f"{flag} has {model.vocab_size} rows in its embedding, the run's model "
            f"{student.vocab_size}: both need the same vocabulary"
        )
    _check_vocabulary(run, name, checkpoint)
    model = replace(model, dropout_rate=0.0, dtype=student.dtype, scan_layers=False, remat="none")
    tensors = fitted(flag, tensors, model, run.data.vocab_size, False)
    params = _placed({name: each["value"] for name, each in tensors.items()}, model, program)
    eos = run.converter.special.eos if pair == _READS_ONE_TEXT else None
    label = partial(_labelled, model, eos, settings.prefix)
    rows = sharding.rows(program.mesh)

    @partial(jax.jit, out_shardings=rows)
    def logits(params: Any, batch: Batch) -> Array:
        with sharding.tracing_on(program.mesh, program.rules):
            return label(params, batch).astype(student.dtype)

    return lambda batch: {**batch, TEACHER_LOGITS: logits(params, batch)}


def _opened(name: str) -> tuple[ModelConfig, dict[str, layout.Parts], Checkpoint | None]:
    """Returns a teacher's model, its unscanned parameters and its checkpoint, if it is one."""
    if from_transformers.is_folder(name):
        # Imported here because it needs packages that the trainer does not otherwise need.
        from trainer import huggingface

        folder = name.removeprefix(from_transformers.PREFIX)
        model = huggingface.model_config(folder)
        leaves = named(huggingface.load(folder, model))
        return model, {path: {"value": held(leaf)} for path, leaf in leaves.items()}, None
    checkpoint = load(name)
    if checkpoint.run is None:
        raise UserError(f"--teacher={name} is no checkpoint of this trainer, nor hf:DIR")
    stored = checkpoint.run["config"]["model"]
    model = stored_model(stored, checkpoint.path)
    return model, layout.read_parts(checkpoint), checkpoint


def _check_vocabulary(run: Run, name: str, checkpoint: Checkpoint | None) -> None:
    own = vocabularies.own_vocabulary(run.data)
    known = own and vocabularies.known(name, checkpoint, run.config.model, own)
    if known not in (None, own, "same"):
        raise UserError(f"--teacher={name} has another vocabulary than the run")


def _placed(values: dict[str, Tensor], model: ModelConfig, program: Program) -> Any:
    """Returns parameters on the program's devices, kernels in the model's dtype."""
    spec = model_spec(model)
    shapes = jax.eval_shape(partial(init_params, spec), jax.random.key(0))
    shardings = sharding.parameter_shardings(
        program.mesh, program.rules, shapes, logical_axes(spec)
    )
    abstract = jax.tree.map(
        lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
        *(shapes, shardings),
    )
    rounded = jax.jit(partial(rounded_kernels, spec), donate_argnums=0)
    return rounded(placed(values, abstract))


def _labelled(
    model: ModelConfig, eos: int | None, prefix: bool, params: Any, batch: Batch
) -> Array:
    """Returns the teacher's logits at the targets; `eos` is set if it reads both sides as one."""
    place_BL = None
    if eos is not None:
        batch, place_BL = one_text(batch, eos, prefix)
    output: Any = run_model(build_model(model_spec(model)), params, batch)
    logits_BTV: Array = getattr(output, "logits_BLV", output)
    if place_BL is None:
        return logits_BTV
    return jnp.take_along_axis(logits_BTV, place_BL[..., None], axis=1)


def one_text(batch: Batch, eos: int, prefix: bool) -> tuple[Batch, Array]:
    """Returns a decoder's batch of both sides' tokens, and where it predicts each target, [B, L].

    An example becomes the decoder's first id, the inputs without their EOS, and the decoder's other
    ids; its rows have S + L positions, with the padding at their end.
    """
    inputs_BS, ids_BL = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    targets_BL = batch["decoder_target_tokens"]
    source_BS = batch.get("encoder_segment_ids", (inputs_BS > 0).astype(jnp.int32))
    own_BL = batch.get("decoder_segment_ids", (targets_BL > 0).astype(jnp.int32))
    following_BS = jnp.pad(source_BS, ((0, 0), (0, 1)))[:, 1:]
    kept_BS = (source_BS > 0) & ~((inputs_BS == eos) & (following_BS != source_BS))
    first_BL = (own_BL > 0) & (jnp.pad(own_BL, ((0, 0), (1, 0)))[:, :-1] != own_BL)

    last = jnp.iinfo(jnp.int32).max
    key_BS = jnp.where(kept_BS, 3 * source_BS + 1, last)
    key_BL = jnp.where(own_BL > 0, 3 * own_BL + jnp.where(first_BL, 0, 2), last)
    key_BT = jnp.concatenate([key_BS, key_BL], axis=1)
    order_BT = jnp.argsort(key_BT, axis=1, stable=True)
    key_BT = jnp.take_along_axis(key_BT, order_BT, axis=1)
    ids_BT = jnp.concatenate([inputs_BS, ids_BL], axis=1)
    ids_BT = jnp.take_along_axis(ids_BT, order_BT, axis=1)
    is_text_BT = key_BT < last
    segment_BT = jnp.where(is_text_BT, key_BT // 3, 0)
    joined = {
        "decoder_input_tokens": jnp.where(is_text_BT, ids_BT, 0),
        "decoder_target_tokens": segment_BT,  # only marks positions with tokens
        "decoder_segment_ids": segment_BT,
    }
    if prefix:
        joined["decoder_causal_attention"] = (is_text_BT & (key_BT % 3 < 2)).astype(jnp.int32)
    place_BT = jnp.argsort(order_BT, axis=1)
    place_BL = place_BT[:, inputs_BS.shape[1] :]
    # The first target follows the last input.
    counts_BL = jnp.sum(kept_BS[:, None] & (source_BS[:, None] == own_BL[..., None]), axis=-1)
    return joined, jnp.where(first_BL, place_BL + counts_BL, place_BL)
