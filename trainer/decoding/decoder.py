"""Decodes prompts to generated ids, in batches, with one compilation per length.

Dimensions: B batch, S encoder length, P prompt length, N new tokens.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS, SpecialIds
from trainer.config.decoding import BEAM, Decoding
from trainer.config.mesh import ROWS
from trainer.decoding import beam, chains
from trainer.decoding.chains import Found
from trainer.decoding.next_token import (
    Cached,
    NextToken,
    Prompts,
    Uncached,
    for_decoding,
    uncached_part,
)
from trainer.engine.sharding import parameter_shardings, put_batch, replicated, rows, tracing_on
from trainer.model.config import ModelConfig
from trainer.model.layers import unstack_layers
from trainer.model.spec import ModelSpec, model_spec
from trainer.model.transformer import (
    Transformer,
    build_model,
    init_params,
    logical_axes,
    rounded_kernels,
)

__all__ = ["Decoded", "Decoder", "Decoding"]

_SHORTEST = 8


class Decoded(NamedTuple):
    """A generated text and its score."""

    ids: np.ndarray  # int32 [tokens], without prompt and EOS
    score: float  # log probability, EOS included; for beam search, divided by the length penalty
    ended: bool  # False if there was no room for EOS


class Decoder:
    """Generates ids after prompts.

    Except for rounding, a result does not depend on the other prompts or on their order:
    rows of a batch are independent, padding depends on the prompt's own length, and draws depend on
    the seed and the example's id. `mesh` divides rows and, following `rules`, parameters. The
    EOS of `special` replaces T5's in `decoding`.

    `without_cache` is the part of the model that forces the row to be recomputed per token, if any.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        decoding: Decoding,
        mesh: Mesh | None = None,
        rules: str = "standard",
        special: SpecialIds = T5_IDS,
    ):
        if not model_config.has_decoder:
            raise UserError(
                f"family {model_config.family} has no decoder: it predicts masked tokens in place "
                "and cannot generate text"
            )
        spec = model_spec(model_config)
        assert isinstance(spec, ModelSpec)
        if decoding.eos_id == T5_IDS.eos:
            decoding = replace(decoding, eos_id=special.eos)
        self._config, self._decoding, self._mesh, self._rules = model_config, decoding, mesh, rules
        self._start = special.starting(model_config.start_id).start
        self._zero_pads = special.zero_pads
        self._scanned, self._spec = spec, for_decoding(spec)
        model = build_model(self._spec)
        assert isinstance(model, Transformer)
        self._model = model
        auto = decoding.cache == "auto"
        self.without_cache = uncached_part(model_config, self._spec) if auto else None
        self._caches = auto and self.without_cache is None
        self._shardings: Any = None
        options: dict[str, Any] = {}
        if mesh is not None:
            axes, key = logical_axes(spec), jax.random.key(0)
            shapes = jax.eval_shape(lambda key: init_params(spec, key), key)
            self._shardings = parameter_shardings(mesh, rules, shapes, axes)
            ins = (self._shardings, rows(mesh), rows(mesh))
            options = {"in_shardings": ins, "out_shardings": replicated(mesh)}
        self._search: Any = jax.jit(self._run, **options)

    @property
    def longest_prompt(self) -> int | None:
        """Length in tokens of the longest possible prompt; None if unbounded."""
        most = self._config.longest_text
        if most is None or self._spec.encoder is not None:
            return most
        return most - self._decoding.max_new_tokens

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], example_ids: Sequence[int] | None = None
    ) -> list[Decoded]:
        """Returns `num_return_sequences` results per prompt, in the order of the prompts.

        A prompt, int [tokens], is the encoder's input with EOS, or the beginning of a decoder-only
        model's text; the start id is added here. `params` are float32. `example_ids` seed the draws
        for prompts; by default, their indices do. Raises UserError if a prompt or the new tokens
        exceed the model's positions.
        """
        if example_ids is None:
            example_ids = range(len(prompts))
        self._check(prompts)
        if self._shardings is not None:
            params = jax.device_put(params, self._shardings)
        found: dict[int, list[Decoded]] = {}
        for places, batch, id_B2 in self._batches(prompts, example_ids):
            token_RN, score_R = jax.device_get(self._search(params, *self._placed(batch, id_B2)))
            for number, place in enumerate(places):
                count = self._decoding.num_return_sequences
                part = slice(number * count, (number + 1) * count)
                found[place] = [
                    self._cut(token_N, float(score))
                    for token_N, score in zip(token_RN[part], score_R[part], strict=True)
                ]
        return [each for place in range(len(prompts)) for each in found[place]]

    def _cut(self, token_N: np.ndarray, score: float) -> Decoded:
        ends = np.flatnonzero(token_N == self._decoding.eos_id)
        ended = len(ends) > 0
        return Decoded(token_N[: ends[0]] if ended else token_N, score, ended)

    def _check(self, prompts: Sequence[np.ndarray]) -> None:
        most, new = self.longest_prompt, self._decoding.max_new_tokens
        if most is None:
            return
        positions = self._config.max_positions
        if most < 0 or new > positions:
            raise UserError(f"max_new_tokens is {new}, but the model has {positions} positions")
        for number, prompt in enumerate(prompts):
            if len(prompt) > most:
                raise UserError(
                    f"prompt {number} has {len(prompt)} tokens, but the model reads at most "
                    f"{most} of its {positions} positions: shorten it"
                )

    def _batches(
        self, prompts: Sequence[np.ndarray], example_ids: Sequence[int]
    ) -> Iterator[tuple[list[int], Prompts, np.ndarray]]:
        """Yields indices of prompts of similar length, their batch, and id halves uint32 [B, 2]."""
        most = self.longest_prompt
        longest: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            longest.setdefault(bucket(len(prompt), most), []).append(place)
        size, encodes = self._decoding.batch_size, self._spec.encoder is not None
        for length in sorted(longest):
            group = longest[length]
            for first in range(0, len(group), size):
                places = group[first : first + size]
                batch = self._rows(len(places))
                prompt_BP = np.zeros((batch, length), np.int32)
                segment_BP = np.zeros_like(prompt_BP)
                length_B = np.zeros(batch, np.int32)
                id_B2 = np.zeros((batch, 2), np.uint32)
                for row, place in enumerate(places):
                    id_B2[row] = divmod(example_ids[place], 1 << 32)
                    prompt_BP[row, : len(prompts[place])] = prompts[place]
                    segment_BP[row, : len(prompts[place])] = 1
                    length_B[row] = 1 if encodes else 1 + len(prompts[place])
                if encodes:
                    start_B1 = np.full((batch, 1), self._start, np.int32)
                    marks_BP = None if self._zero_pads else segment_BP
                    made = Prompts(start_B1, length_B, prompt_BP, marks_BP)
                else:
                    # Rows begin as in training.
                    begun_BP = np.pad(prompt_BP, ((0, 0), (1, 0)), constant_values=self._start)
                    made = Prompts(begun_BP, length_B)
                yield places, made, id_B2

    def _rows(self, count: int) -> int:
        """Returns the row count for `count` prompts: a power of two, rounded up for the mesh."""
        number = 1 << (count - 1).bit_length()
        parts = math.prod(self._mesh.shape[axis] for axis in ROWS) if self._mesh is not None else 1
        return -(-number // parts) * parts

    def _placed(self, batch: Prompts, id_B2: np.ndarray) -> tuple[Prompts, Any]:
        if self._mesh is None:
            return batch, id_B2
        arrays = {**batch._asdict(), "id_B2": id_B2}
        placed = put_batch({k: v for k, v in arrays.items() if v is not None}, self._mesh)
        id_B2 = placed.pop("id_B2")
        return Prompts(**placed), id_B2

    def _run(self, params: Any, prompts: Prompts, id_B2: jax.Array) -> Found:
        with (
            tracing_on(self._mesh, self._rules)
            if self._mesh is not None
            else contextlib.nullcontext()
        ):
            return self._found(params, prompts, id_B2)

    def _found(self, params: Any, prompts: Prompts, id_B2: jax.Array) -> Found:
        if self._scanned.shared.scan_layers:
            params = unstack_layers(params)
        params = rounded_kernels(self._spec, params)
        kind = Cached if self._caches else Uncached
        decoding, width = self._decoding, prompts.decoder_BP.shape[1]
        model: NextToken = kind(self._model, width, decoding.max_new_tokens, decoding.prefix)
        if decoding.method == BEAM:
            return beam.search(model, params, prompts, decoding)
        key_R = keys_of(decoding.seed, id_B2, decoding.rows)
        return chains.decode(model, params, prompts, decoding, key_R)


def keys_of(seed: int, id_B2: jax.Array, count: int) -> jax.Array:
    """Returns keys [B * count] for `count` draws per example, which depend only on seed and id."""

    def of_draw(id_2: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        for part in (*id_2, number):
            key = jax.random.fold_in(key, part)
        return key

    numbers = jnp.tile(jnp.arange(count), len(id_B2))
    return jax.vmap(of_draw)(jnp.repeat(id_B2, count, axis=0), numbers)


def bucket(length: int, most: int | None = None) -> int:
    """Returns the padded length of a prompt: the next of four sizes per power of two, up to `most`.

    Keeps the number of compiled lengths small, with at most 20% padding.
    """
    step = max(_SHORTEST, (1 << max(length - 1, 1).bit_length()) // 8)
    places = max(_SHORTEST, -(-length // step) * step)
    return places if most is None else max(min(places, most), 1)
