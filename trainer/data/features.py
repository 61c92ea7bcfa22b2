"""Converts examples to a model's features, under T5X's names; one converter per architecture.

Dimensions: W windows (rows of a batch), N positions of an example, L positions of a feature.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from tasks.objectives import Examples, Lengths, Objective, noise
from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS, SpecialIds
from trainer.config.run import Config
from trainer.model.config import ModelConfig

Batch = dict[str, np.ndarray]


class Converter(Protocol):
    """Converts examples to features, one per row or packed; lengths of missing stacks are 0."""

    @property
    def lengths(self) -> Lengths: ...
    @property
    def special(self) -> SpecialIds: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def encoder_length(self) -> int: ...
    @property
    def decoder_length(self) -> int: ...
    def __call__(self, examples: Examples) -> Batch: ...
    def packed(self, examples: Examples, rows_E: np.ndarray, rows: int) -> Batch: ...


def converter(model: ModelConfig, lengths: Lengths, special: SpecialIds = T5_IDS) -> Converter:
    """Returns the converter for a model and a vocabulary's special ids."""
    special = special.starting(model.start_id)
    if not model.has_decoder:
        return EncoderConverter(lengths, special)
    return FeatureConverter(lengths, model.has_encoder, special)


def longest_row(config: Config) -> int:
    """Returns the positions of the longest rows that a run trains on; 0 if no length is set."""
    made = converter(config.model, config.phases.longest)
    return max(made.encoder_length, made.decoder_length)


def convertible(model: ModelConfig, objective: Objective) -> bool:
    """Returns whether a model can train on the examples of an objective."""
    known = FeatureConverter if model.has_decoder else EncoderConverter
    return model.architecture in objective.architectures and {*objective.features} <= known.features


# Metric, a side's share of positions without padding -> (the side, its tokens).
FILLING = MappingProxyType(
    {
        "inputs_full": ("encoder", "encoder_input_tokens"),
        "targets_full": ("decoder", "decoder_target_tokens"),
    }
)


def token_places(batch: Mapping[str, Any], side: str) -> Any:
    """Returns the side's segment ids or, without them, its tokens: positive at tokens, [W, L]."""
    tokens = "encoder_input_tokens" if side == "encoder" else "decoder_target_tokens"
    return batch.get(f"{side}_segment_ids", batch[tokens])


def filling(batch: Batch) -> dict[str, float]:
    """Returns the shares of positions without padding, under the names in FILLING."""
    return {
        name: float(np.count_nonzero(token_places(batch, side)) / batch[feature].size)
        for name, (side, feature) in FILLING.items()
        if feature in batch
    }


def target_side(batch: Mapping[str, Any]) -> str:
    """Returns the side whose tokens are predicted, "encoder" or "decoder"."""
    return "decoder" if "decoder_target_tokens" in batch else "encoder"


@dataclasses.dataclass(frozen=True)
class FeatureConverter:
    """Converts examples for T5X's encoder-decoder and decoder-only models.

    A decoder-only model gets inputs and targets as one sequence, with the loss on the targets;
    `decoder_causal_attention` is 1 on the inputs and the next position, as in seqio's
    PrefixLMFeatureConverter. Examples without inputs use the objective's own "weights" and
    "prefix".

    Padding is id 0. If id 0 is a piece, segment ids mark tokens: packed rows have them, other
    rows get 1 on every token. The decoder's first input is `special.start`.
    """

    lengths: Lengths
    encoder_decoder: bool
    special: SpecialIds = T5_IDS
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
        length = self.decoder_length
        if self.encoder_decoder or not self.lengths.inputs:
            is_target_WL = noise.within(target_lengths_W, length)
            given = not self.encoder_decoder and "prefix" in examples
            weights_WL = _fit(examples["weights"][0], length) if given else is_target_WL
            batch = self._decoder_features(_fit(targets_WN, length), weights_WL)
            if given:
                batch["decoder_causal_attention"] = _fit(examples["prefix"][0], length)
            if not self.encoder_decoder:
                return self._marked(batch, decoder=is_target_WL)
            inputs_WN, input_lengths_W = examples["inputs"]
            batch["encoder_input_tokens"] = _fit(inputs_WN, self.lengths.inputs)
            is_input_WL = noise.within(input_lengths_W, self.lengths.inputs)
            return self._marked(batch, encoder=is_input_WL, decoder=is_target_WL)
        inputs_WN, input_lengths_W = examples["inputs"]
        sequence_WL, columns = _fit(inputs_WN, length), np.arange(length)
        after_W = input_lengths_W[:, None]
        is_token_WL = columns < after_W + target_lengths_W[:, None]
        on_target_WL = (columns >= after_W) & is_token_WL
        from_target_WN = np.arange(targets_WN.shape[1]) < target_lengths_W[:, None]
        sequence_WL[on_target_WL] = targets_WN[from_target_WN]
        batch = self._decoder_features(sequence_WL, on_target_WL)
        batch["decoder_causal_attention"] = (columns <= after_W).astype(np.int32)
        return self._marked(batch, decoder=is_token_WL)

    def _marked(self, batch: Batch, **is_token_WL: np.ndarray) -> Batch:
        """Adds segment ids to a batch with one example per row if id 0 is a piece."""
        if not self.special.zero_pads:
            for side, is_token in is_token_WL.items():
                batch[f"{side}_segment_ids"] = is_token.astype(np.int32)
        return batch

    def _decoder_features(self, targets_WL: np.ndarray, weights_WL: np.ndarray) -> Batch:
        inputs_WL = np.full_like(targets_WL, self.special.start)
        inputs_WL[:, 1:] = targets_WL[:, :-1]
        return {
            "decoder_target_tokens": targets_WL,
            "decoder_input_tokens": inputs_WL,
            "decoder_loss_weights": weights_WL.astype(np.int32),
        }

    def packed(self, examples: Examples, rows_E: np.ndarray, rows: int) -> Batch:
        """Returns int32 [rows, L] arrays, padded with 0, with several examples per row.

        As in seqio's packing, segment ids count a row's examples from 1, positions restart in each,
        and the first decoder input of each is `special.start` (0 for T5). `rows_E`, int64 [E], is
        the row of each example, ascending; a row's examples must fit.
        """
        sides = [_flat(examples[name]) for name in ("inputs", "targets")]
        if self.encoder_decoder:
            batch = {}
            for name, (tokens, sizes_E), length in (
                ("encoder_input", sides[0], self.lengths.inputs),
                ("decoder_target", sides[1], self.lengths.targets),
            ):
                place, segment, position = _places(sizes_E, rows_E, length)
                side = name.partition("_")[0]
                batch[f"{name}_tokens"] = _laid(tokens, place, rows, length)
                batch[f"{side}_segment_ids"] = _laid(segment, place, rows, length)
                batch[f"{side}_positions"] = _laid(position, place, rows, length)
            is_target_WL = batch["decoder_segment_ids"] > 0
            batch.update(self._decoder_features(batch["decoder_target_tokens"], is_target_WL))
        else:
            (inputs, inputs_E), (targets, targets_E) = sides
            sizes_E, length = inputs_E + targets_E, self.decoder_length
            place, segment, position = _places(sizes_E, rows_E, length)
            on_target = position >= np.repeat(inputs_E, sizes_E)
            tokens = np.empty(len(place), np.int32)
            tokens[~on_target], tokens[on_target] = inputs, targets
            both_ways = position <= np.repeat(inputs_E, sizes_E)
            batch = self._decoder_features(
                _laid(tokens, place, rows, length), _laid(on_target, place, rows, length)
            )
            batch["decoder_causal_attention"] = _laid(both_ways, place, rows, length)
            batch["decoder_segment_ids"] = _laid(segment, place, rows, length)
            batch["decoder_positions"] = _laid(position, place, rows, length)
        # An example's first input must not be the previous example's last token.
        first_WL = batch["decoder_positions"] == 0
        batch["decoder_input_tokens"][first_WL] = self.special.start
        return batch


@dataclasses.dataclass(frozen=True)
class EncoderConverter:
    """Converts examples of `MaskedLM` for an encoder-only model.

    Tokens, targets and weights have the names of seqio's EncoderFeatureConverter. In addition,
    `encoder_token_types`, int32 [W, L], is 0 on the first segment and the token before it, and 1 on
    the second; `sentence_order`, int32 [W], is 1 if the two were swapped. Padding is as in
    `FeatureConverter`.
    """

    lengths: Lengths
    special: SpecialIds = T5_IDS
    decoder_length = 0
    features = frozenset({"inputs", "targets", "weights", "segments", "order"})

    @property
    def encoder_length(self) -> int:
        """Positions of the encoder."""
        return self.lengths.inputs

    def packed(self, examples: Examples, rows_E: np.ndarray, rows: int) -> Batch:
        """Raises a UserError: an encoder-only model reads one example per row."""
        raise UserError("--data.pack_examples is for models with a decoder: leave it out")

    def __call__(self, examples: Examples) -> Batch:
        """Returns int32 arrays padded with 0."""
        inputs_WL, targets_WL, weights_WL, segments_WL = (
            _fit(examples[name][0], self.lengths.inputs)
            for name in ("inputs", "targets", "weights", "segments")
        )
        batch = {
            "encoder_input_tokens": inputs_WL,
            "encoder_token_types": np.maximum(segments_WL - 1, 0),
            "encoder_target_tokens": targets_WL,
            "encoder_loss_weights": weights_WL,
            "sentence_order": examples["order"][0][:, 0].astype(np.int32),
        }
        if not self.special.zero_pads:
            is_token_WL = noise.within(examples["inputs"][1], self.lengths.inputs)
            batch["encoder_segment_ids"] = is_token_WL.astype(np.int32)
        return batch


def _flat(feature: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the concatenated values of all examples without padding, and their sizes."""
    values_EN, sizes_E = feature
    return values_EN[np.arange(values_EN.shape[1]) < sizes_E[:, None]], sizes_E


def _places(
    sizes_E: np.ndarray, rows_E: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns each packed token's place in the rows, example in the row (from 1) and position."""
    begins_E = np.cumsum(sizes_E) - sizes_E
    first_E = np.searchsorted(rows_E, rows_E)  # the first example of the same row
    offsets_E = begins_E - begins_E[first_E]
    assert not len(sizes_E) or (offsets_E + sizes_E).max() <= length, "a row is too full"
    position = np.arange(int(sizes_E.sum())) - np.repeat(begins_E, sizes_E)
    place = np.repeat(rows_E * length + offsets_E, sizes_E) + position
    return place, np.repeat(np.arange(len(sizes_E)) - first_E + 1, sizes_E), position


def _laid(values: np.ndarray, place: np.ndarray, rows: int, length: int) -> np.ndarray:
    out_WL = np.zeros((rows, length), np.int32)
    out_WL.reshape(-1)[place] = values
    return out_WL


def _fit(tokens_WN: np.ndarray, length: int) -> np.ndarray:
    """Pads with 0 to `length`, or cuts padding; objectives plan lengths, so no token is lost."""
    out = np.zeros((len(tokens_WN), length), np.int32)
    width = min(length, tokens_WN.shape[1])
    assert not tokens_WN[:, width:].any(), "an example is longer than its feature"
    out[:, :width] = tokens_WN[:, :width]
    return out
