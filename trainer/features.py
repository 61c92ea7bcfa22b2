"""Examples -> the features a T5X model takes, under T5X's names.

Dimensions: W windows (rows of a batch), N positions of an example, L positions of a feature.
"""

import dataclasses

import numpy as np

from tasks.objectives import Examples, Lengths

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class FeatureConverter:
    """Examples -> the features a T5X model takes; seqio's converters, one example a row.

    `encoder_decoder` says which of the two kinds of model. A decoder-only model gets inputs and
    targets as one sequence, its loss on the targets, and `decoder_causal_attention` on the inputs
    and one position more, as seqio's PrefixLMFeatureConverter does; or, without inputs, the
    objective's own "weights" and "prefix" in their places.
    """

    lengths: Lengths
    encoder_decoder: bool

    @property
    def decoder_length(self) -> int:
        """Positions of the decoder."""
        return self.lengths.targets + (0 if self.encoder_decoder else self.lengths.inputs)

    def __call__(self, examples: Examples) -> Batch:
        """Returns int32 [rows, length] arrays, padded with 0."""
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


def _fit(tokens_WN: np.ndarray, length: int) -> np.ndarray:
    """Pads with 0 to `length`; cuts only padding, since objectives plan their lengths."""
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
