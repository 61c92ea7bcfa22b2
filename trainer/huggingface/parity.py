"""Compares a model's logits in transformers with the trainer's."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from trainer.data.features import Batch, target_side, token_places
from trainer.huggingface.configs import CUSTOM
from trainer.model.config import ModelConfig

# The order of float32 sums causes differences of 1e-6 to 1e-5; even small errors cause 1e-3.
TOLERANCE = 1e-4

Logits = list[np.ndarray]
# Maps a batch to token logits [B, L, V] and, for an encoder-only model, row logits [B, C].
Compute = Callable[[Batch], Logits]


class Parity(NamedTuple):
    """The largest absolute difference between logits, over all rows and positions but padding.

    `agreement` is the share of positions, 0 to 1, at which both models prefer the same token.
    """

    rows: int
    positions: int
    difference: float
    agreement: float

    @property
    def holds(self) -> bool:
        """True if the logits are equal up to TOLERANCE; False if any is NaN."""
        return self.difference <= TOLERANCE and self.agreement == 1.0

    def __str__(self) -> str:
        return (
            f"largest difference {self.difference:.1e} over {self.positions:,} positions of "
            f"{self.rows} rows, same most likely token at {self.agreement:.4%} of positions"
        )


def compare(ours: Compute, theirs: Compute, batches: Iterable[Batch]) -> Parity:
    """Compares two models on the non-padding tokens of batches."""
    rows = positions = equal = 0
    difference = 0.0
    for batch in map(_first_segments, batches):
        is_token = token_places(batch, target_side(batch)) > 0
        rows += int(is_token.any(axis=1).sum())
        positions += int(is_token.sum())
        of_theirs = theirs(batch)  # perhaps without a head for rows
        pairs = list(zip(ours(batch)[: len(of_theirs)], of_theirs, strict=True))
        equal += int((pairs[0][0].argmax(-1) == pairs[0][1].argmax(-1))[is_token].sum())
        masks = [is_token, is_token.any(axis=1)]
        for (mine, other), mask in zip(pairs, masks, strict=False):
            apart = np.abs(mine - other)[mask].max(initial=0.0)
            difference = float(np.maximum(difference, apart))  # NaN stays NaN
    return Parity(rows, positions, difference, equal / max(positions, 1))


def our_logits(config: ModelConfig, params: Any) -> Compute:
    """Returns a function that computes our model's logits in float32 with plain attention."""
    apply = _applied(dataclasses.replace(config, dtype="float32", attention="einsum"))

    def compute(batch: Batch) -> Logits:
        output = apply(params, batch)
        return [np.asarray(part) for part in (output if isinstance(output, tuple) else [output])]

    return compute


@functools.cache
def _applied(config: ModelConfig) -> Callable[[Any, Batch], Any]:
    import jax

    from trainer.model.spec import model_spec
    from trainer.model.transformer import build_model

    model = build_model(model_spec(config))

    @jax.jit
    def apply(params: Any, batch: Batch) -> Any:
        with jax.default_matmul_precision("highest"):
            return model.apply({"params": params}, batch)

    return apply


def has_class(written: Mapping[str, Any]) -> bool:
    """Returns whether the installed transformers has the class that a config.json names."""
    extras.check_triton("transformers")
    import transformers

    own = written["model_type"] == CUSTOM
    return own or hasattr(transformers, written["architectures"][0])


def their_model(folder: str, written: Mapping[str, Any]) -> Any:
    """Loads `folder` in float32 on the CPU, as the class that its config.json, `written`, names."""
    extras.check_triton("transformers")
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
    if written["model_type"] == "umt5" and not written["tie_word_embeddings"]:
        # transformers 5 treats every umT5 as tied and scales even untied logits; transformers 4
        # and the authors' code do not.
        model.config.tie_word_embeddings = False
    return model.eval()


def their_logits(model: Any) -> Compute:
    """Returns a function that computes a transformers model's logits on our batches."""
    import torch

    encoder_decoder = model.config.is_encoder_decoder
    has_types = getattr(model.config, "type_vocab_size", 0) > 1

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(np.asarray(array, np.int64))

    def compute(batch: Batch) -> Logits:
        inputs = {}
        if "encoder_input_tokens" in batch:
            tokens = tensor(batch["encoder_input_tokens"])
            places = tensor(token_places(batch, "encoder"))
            inputs = {"input_ids": tokens, "attention_mask": (places > 0).long()}
        if "encoder_token_types" in batch and has_types:
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
    """Keeps only the first example of each packed row; transformers does not support packing."""
    if not any(name.endswith("_segment_ids") for name in batch):
        return batch
    kept = {}
    for name, array in batch.items():
        segments = batch.get(f"{name.split('_')[0]}_segment_ids")
        if not name.endswith("_positions"):
            kept[name] = array if segments is None else np.where(segments == 1, array, 0)
    return kept
