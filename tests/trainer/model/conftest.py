"""Tiny models of every family, and batches that tell positions apart."""

from __future__ import annotations

from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.model.config import ModelConfig
from trainer.model.part_facts import DECODER, ENCODER
from trainer.model.paths import named
from trainer.model.registry import FAMILIES
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params

ENCODER_LENGTH, DECODER_LENGTH, VOCAB_SIZE = 7, 6, 40


def tiny_config(family: str, **changes) -> ModelConfig:
    architecture = FAMILIES[family].architecture if family in FAMILIES else None
    fields = {
        "family": family, "vocab_size": VOCAB_SIZE, "emb_dim": 12, "num_heads": 2, "head_dim": 4,
        "mlp_dim": 16, "num_encoder_layers": 0 if architecture == DECODER else 1,
        "num_decoder_layers": 0 if architecture == ENCODER else 1,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def family_of(slot: str, name: str) -> str:
    """Returns a family that can have a part: a decoder unless the part needs an encoder."""
    try:
        tiny_config("lm", num_heads=4, max_positions=8, **{slot: name})
    except ValueError:
        return "t5_1_1"
    return "lm"


class TinyModel:
    """A model of a configuration, or of a family with changes.

    A family's logits are untied, so that embeddings act through the input only.
    """

    def __init__(self, model: str | ModelConfig, **changes) -> None:
        if isinstance(model, str):
            model = tiny_config(model, **({"tied_logits": False} | changes))
        self.config = model
        self.spec = model_spec(self.config)
        self.model = build_model(self.spec)
        self.has_encoder = self.spec.encoder is not None
        self._applied = {}

    @cached_property
    def params(self):
        """Random in every tensor, and without compiling the initialisers."""
        shapes = jax.eval_shape(lambda: init_params(self.spec, jax.random.key(0)))
        random = np.random.default_rng(0)
        return jax.tree.map(
            lambda leaf: jnp.asarray(0.4 * random.normal(size=leaf.shape), jnp.float32), shapes
        )

    def apply(self, batch, params=None, **arguments):
        """Returns what the model does, compiled once for each shape of a batch."""
        applied = self._applied.setdefault(
            frozenset(arguments.items()),
            jax.jit(lambda p, b: self.model.apply({"params": p}, b, **arguments)),
        )
        return applied(self.params if params is None else params, batch)


tiny_model = cache(TinyModel)


def initial(spec, *paths):
    """Returns initial parameters by path, or one by its path alone, and compiles no others."""

    @jax.jit
    def of(key):
        leaves = named(init_params(spec, key))
        return {path: leaves[path] for path in paths or leaves}

    found = of(jax.random.key(0))
    return found[paths[0]] if len(paths) == 1 else found


def unboxed(params):
    """Returns the arrays of a module's parameters without the names of their axes."""
    return jax.tree.map(lambda box: box.value, params, is_leaf=lambda node: hasattr(node, "names"))


@pytest.fixture(scope="session")
def make_tiny():
    return tiny_model


@pytest.fixture(scope="session")
def make_config():
    return tiny_config


@pytest.fixture(scope="session")
def packed():
    """Returns two rows on each side, one with two examples and padding, one with one example."""
    random = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    tokens = {
        name: np.where(segments > 0, random.integers(1, 40, segments.shape), 0)
        for name in ("encoder_input_tokens", "encoder_target_tokens", "decoder_target_tokens")
    }
    return {
        **tokens, "decoder_input_tokens": np.roll(tokens["decoder_target_tokens"], 1, axis=1),
        "encoder_segment_ids": segments, "decoder_segment_ids": segments,
        "encoder_loss_weights": segments > 0, "decoder_loss_weights": segments > 0,
    }  # fmt: skip


@pytest.fixture
def batch() -> dict[str, jax.Array]:
    """Returns one row, in which every input position of both sides has a different id.

    Encoder ids are 1, 2, ...; decoder ids continue from there. The last position of each side is
    padding: it has no input id in the encoder and no target id in the decoder.
    """
    encoder = jnp.arange(1, ENCODER_LENGTH + 1)
    decoder = jnp.arange(ENCODER_LENGTH + 1, ENCODER_LENGTH + DECODER_LENGTH + 1)
    return {
        "encoder_input_tokens": encoder.at[-1].set(0)[None],
        "decoder_input_tokens": decoder[None],
        "decoder_target_tokens": jnp.ones((1, DECODER_LENGTH), int).at[0, -1].set(0),
    }
