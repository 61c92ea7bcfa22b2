"""Whether a folder of transformers computes what our parameters do: logits held against logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tasks.terminal.command_line import UserError
from trainer.data.features import Batch
from trainer.huggingface.configs import CUSTOM
from trainer.model.config import ModelConfig

# What float32 leaves of a difference in the order of sums; the least of mistakes makes 1e-3.
TOLERANCE = 1e-4

Logits = list[np.ndarray]
# A batch to logits, of tokens [B, L, V] and, of an encoder alone, of rows [B, C].
Compute = Callable[[Batch], Logits]


class Parity(NamedTuple):
    """What was compared: rows, and positions with a token in them; how far logits are apart at
    most, and at which share of positions the same token is first."""

    rows: int
    positions: int
    difference: float
    agreement: float

    @property
    def holds(self) -> bool:
        """Whether the gate is open; not if anything is NaN."""
        return self.difference <= TOLERANCE and self.agreement == 1.0

    def __str__(self) -> str:
        return (
            f"largest difference of logits {self.difference:.1e} over {self.positions:,} positions "
            f"of {self.rows} rows, first tokens equal at {self.agreement:.4%}"
        )


def compare(ours: Compute, theirs: Compute, batches: Iterable[Batch]) -> Parity:
    """Holds two models against each other on the tokens of batches."""
    rows = positions = equal = 0
    difference = 0.0
    for batch in map(_first_segments, batches):
        side = "encoder_input_tokens" if "decoder_target_tokens" not in batch else None
        is_token = batch[side or "decoder_target_tokens"] > 0
        rows += int(is_token.any(axis=1).sum())
        positions += int(is_token.sum())
        pairs = list(zip(ours(batch), theirs(batch), strict=True))
        equal += int((pairs[0][0].argmax(-1) == pairs[0][1].argmax(-1))[is_token].sum())
        masks = [is_token, is_token.any(axis=1)]
        for (mine, other), mask in zip(pairs, masks, strict=False):
            apart = np.abs(mine - other)[mask].max(initial=0.0)
            difference = float(np.maximum(difference, apart))  # NaN stays NaN
    return Parity(rows, positions, difference, equal / max(positions, 1))


def our_logits(config: ModelConfig, params: Any) -> Compute:
    """Our model in float32, whatever it was trained in; `params` are its own tree."""
    import dataclasses

    import jax

    from trainer.model.spec import model_spec
    from trainer.model.transformer import build_model

    model = build_model(model_spec(dataclasses.replace(config, dtype="float32")))

    @jax.jit
    def apply(params: Any, batch: Batch) -> Any:
        with jax.default_matmul_precision("highest"):
            return model.apply({"params": params}, batch)

    def compute(batch: Batch) -> Logits:
        output = apply(params, batch)
        return [np.asarray(part) for part in (output if isinstance(output, tuple) else [output])]

    return compute


def their_model(folder: str, written: Mapping[str, Any]) -> Any:
    """The model of a folder in float32 on the CPU, by the class that its config.json names."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if written["model_type"] == CUSTOM:
        kind: Any = transformers.AutoModelForCausalLM
    else:
        kind = getattr(transformers, written["architectures"][0])
    model, report = kind.from_pretrained(
        folder,
        dtype="float32",
        trust_remote_code=written["model_type"] == CUSTOM or None,
        output_loading_info=True,
    )
    for word, names in report.items():
        if names:
            raise UserError(f"{folder}: transformers reports {word}: {', '.join(map(str, names))}")
    return model.eval()


def their_logits(model: Any) -> Compute:
    """A model of transformers, fed with our batches."""
    import torch

    encoder_decoder = model.config.is_encoder_decoder

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(np.asarray(array, np.int64))

    def compute(batch: Batch) -> Logits:
        inputs = {}
        if "encoder_input_tokens" in batch:
            tokens = tensor(batch["encoder_input_tokens"])
            inputs = {"input_ids": tokens, "attention_mask": (tokens > 0).long()}
        if "encoder_token_types" in batch:
            inputs["token_type_ids"] = tensor(batch["encoder_token_types"])
        if "decoder_input_tokens" in batch:
            name = "decoder_input_ids" if encoder_decoder else "input_ids"
            inputs[name] = tensor(batch["decoder_input_tokens"])
        if "decoder_causal_attention" in batch:
            inputs["prefix_mask"] = tensor(batch["decoder_causal_attention"])
        with torch.no_grad():
            output = model(**inputs)
        names = ("prediction_logits", "seq_relationship_logits")
        parts = [output[name] for name in names] if names[0] in output else [output.logits]
        return [part.numpy() for part in parts]

    return compute


def _first_segments(batch: Batch) -> Batch:
    """Of rows that are packed, the first example alone: transformers has no segments."""
    if not any(name.endswith("_segment_ids") for name in batch):
        return batch
    kept = {}
    for name, array in batch.items():
        segments = batch.get(f"{name.split('_')[0]}_segment_ids")
        if not name.endswith(("_segment_ids", "_positions")):
            kept[name] = array if segments is None else np.where(segments == 1, array, 0)
    return kept
