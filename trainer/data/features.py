"""Converts examples to a model's features, under T5X's names; one converter per architecture.

Dimensions: W windows (rows of a batch), N positions of an example, L positions of a feature.
"""

import dataclasses
from types import MappingProxyType
from typing import Protocol

import numpy as np

from tasks.objectives import Examples, Lengths, Objective
from trainer.model.config import ModelConfig

Batch = dict[str, np.ndarray]


class Converter(Protocol):
    """Converts examples to features, one example per row.

    A length is 0 if the model has no such stack.
    """

    @property
    def lengths(self) -> Lengths: ...
    @property
    def encoder_length(self) -> int: ...
    @property
    def decoder_length(self) -> int: ...
    def __call__(self, examples: Examples) -> Batch: ...


def converter(model: ModelConfig, lengths: Lengths) -> Converter:
    """Returns the converter for a model."""
    if model.architecture == "encoder":
        return EncoderConverter(lengths)
    return FeatureConverter(lengths, encoder_decoder=model.architecture == "encoder_decoder")


def convertible(model: ModelConfig, objective: Objective) -> bool:
    """Returns whether a model can train on the examples of an objective."""
    known = EncoderConverter if model.architecture == "encoder" else FeatureConverter
    return model.architecture in objective.architectures and {*objective.features} <= known.features


# Metric -> the feature whose share of positions without padding it is.
FILLING = MappingProxyType(
    {"inputs_full": "encoder_input_tokens", "targets_full": "decoder_target_tokens"}
)


def filling(batch: Batch) -> dict[str, float]:
    """Returns the share of positions without padding, by the names in FILLING."""
    return {
        name: float(np.count_nonzero(batch[feature]) / batch[feature].size)
        for name, feature in FILLING.items()
        if feature in batch
    }


def target_side(batch: Batch) -> str:
    """Returns the side whose tokens are predicted, "encoder" or "decoder".

    Its targets and weights are `encoder_target_tokens` and `encoder_loss_weights`, or the same with
    `decoder`.
    """
    return "decoder" if "decoder_target_tokens" in batch else "encoder"


@dataclasses.dataclass(frozen=True)
class FeatureConverter:
    """Converts examples for T5X's encoder-decoder and decoder-only models, one example per row.

    A decoder-only model gets inputs and targets as one sequence, with the loss on the targets, and
    `decoder_causal_attention` is 1 on the inputs and the next position, as in seqio's
    PrefixLMFeatureConverter. For examples without inputs, the objective's own "weights" and
    "prefix" are used.

    Attributes:
      lengths: lengths of the examples' features.
      encoder_decoder: True for an encoder-decoder, False for a decoder-only model.
    """

    lengths: Lengths
    encoder_decoder: bool
    features = frozenset({"inputs", "targets", "weights", "prefix"})

    @property
    def encoder_length(self) -> int:
        """Positions of the encoder."""
        return self.lengths.inputs if self.encoder_decoder else 0

    @property
    def decoder_length(self) -> int:
        """Positions of the decoder."""
        return self.lengths.targets + (0 if self.encoder_decoder else self.lengths.inputs)

    def __call__(self, examples: Examples) -> Batch:
        """Returns int32 [W, L] arrays, padded with 0."""
        targets_WN, target_lengths_W = examples["targets"]
        if self.encoder_decoder:
            targets_WL = _fit(targets_WN, self.lengths.targets)
            batch = _decoder_features(targets_WL, targets_WL > 0)
            batch["encoder_input_tokens"] = _fit(examples["inputs"][0], self.lengths.inputs)
            return batch
        if not self.lengths.inputs:
            targets_WL = _fit(targets_WN, self.decoder_length)
            if "prefix" not in examples:
                return _decoder_features(targets_WL, targets_WL > 0)
            weights_WL, prefix_WL = (
                _fit(examples[name][0], self.decoder_length) for name in ("weights", "prefix")
            )
            batch = _decoder_features(targets_WL, weights_WL)
            batch["decoder_causal_attention"] = prefix_WL
            return batch
        inputs_WN, input_lengths_W = examples["inputs"]
        sequence_WL = _fit(inputs_WN, self.decoder_length)
        columns = np.arange(self.decoder_length)
        after_W = input_lengths_W[:, None]
        on_target_WL = (columns >= after_W) & (columns < after_W + target_lengths_W[:, None])
        from_target_WN = np.arange(targets_WN.shape[1]) < target_lengths_W[:, None]
        sequence_WL[on_target_WL] = targets_WN[from_target_WN]
        batch = _decoder_features(sequence_WL, on_target_WL)
        batch["decoder_causal_attention"] = (columns <= after_W).astype(np.int32)
        return batch


@dataclasses.dataclass(frozen=True)
class EncoderConverter:
    """Converts examples of `MaskedLM` for an encoder-only model.

    Tokens, targets and weights have the names of seqio's EncoderFeatureConverter. Besides,
    `encoder_token_types`, int32 [W, L], is 0 on the first segment and the token before it, and 1 on
    the second; `sentence_order`, int32 [W], is 1 where the two were swapped.
    """

    lengths: Lengths
    decoder_length = 0
    features = frozenset({"inputs", "targets", "weights", "segments", "order"})

    @property
    def encoder_length(self) -> int:
        """Positions of the encoder."""
        return self.lengths.inputs

    def __call__(self, examples: Examples) -> Batch:
        """Returns int32 arrays padded with 0."""
        inputs_WL, targets_WL, weights_WL, segments_WL = (
            _fit(examples[name][0], self.lengths.inputs)
            for name in ("inputs", "targets", "weights", "segments")
        )
        return {
            "encoder_input_tokens": inputs_WL,
            "encoder_token_types": np.maximum(segments_WL - 1, 0),
            "encoder_target_tokens": targets_WL,
            "encoder_loss_weights": weights_WL,
            "sentence_order": examples["order"][0][:, 0].astype(np.int32),
        }


def _fit(tokens_WN: np.ndarray, length: int) -> np.ndarray:
    """Pads with 0 to `length`, or cuts padding; objectives plan lengths, so no token is cut."""
    out = np.zeros((len(tokens_WN), length), np.int32)
    width = min(length, tokens_WN.shape[1])
    assert not tokens_WN[:, width:].any(), "an example is longer than its feature"
    out[:, :width] = tokens_WN[:, :width]
    return out


def _decoder_features(targets_WL: np.ndarray, weights_WL: np.ndarray) -> Batch:
    inputs_WL = np.zeros_like(targets_WL)
    inputs_WL[:, 1:] = targets_WL[:, :-1]
    return {
        "decoder_target_tokens": targets_WL,
        "decoder_input_tokens": inputs_WL,
        "decoder_loss_weights": weights_WL.astype(np.int32),
    }
