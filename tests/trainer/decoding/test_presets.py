"""Decoding with a cache equals the parallel pass, for every preset at sizes for a test."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.support.cases import entries, rows
from tests.support.parameters import slow_unless
from tests.trainer.model.conftest import TinyModel
from tests.trainer.model.test_every_preset import MODELS, PREDICTS_NEXT, VOCAB_SIZE
from trainer.decoding.decoder import Decoder, Decoding
from trainer.decoding.next_token import Cached, Prompts, Uncached, for_decoding, uncached_part
from trainer.model.config import ModelConfig
from trainer.model.layers import stack_layers
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model

pytestmark = pytest.mark.processes

NEW, WIDTH = 5, 6
# One of each kind of cache, and one prefix that sees itself; the others are slow.
FAST = (("t5_1_1_tiny", False), ("lm_tiny", True), *rows("DECODED_FAST"))


def steps_of(
    config: ModelConfig, prefix: bool, kind: type = Cached
) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits [B, N, V] of given tokens: step by step, and of the training pass."""
    params = TinyModel(config).params
    spec = for_decoding(model_spec(config))
    model, random = build_model(spec), np.random.default_rng(3)
    encodes = spec.encoder is not None
    length_B = np.array([1, 1, 1] if encodes else [WIDTH, 2, 4])
    width = 1 if encodes else WIDTH
    token_BL = random.integers(3, VOCAB_SIZE, (3, WIDTH + NEW)).astype(np.int32)
    token_BL[:, 0] = 0
    prompt_BP = np.where(np.arange(width) < length_B[:, None], token_BL[:, :width], 0)
    source_BS = random.integers(3, VOCAB_SIZE, (3, 7)).astype(np.int32)
    source_BS[1, 4:] = 0
    prompts = Prompts(prompt_BP, length_B, source_BS if encodes else None)
    machine = kind(model, width, NEW, prefix)
    new_BN = np.stack([row[n : n + NEW - 1] for row, n in zip(token_BL, length_B, strict=True)])

    logits_BV, kept, state = jax.jit(machine.start)(params, prompts)
    stepped, step = [logits_BV], jax.jit(machine.step)
    for number in range(NEW - 1):
        logits_BV, state = step(params, kept, state, new_BN[:, number], np.int32(number))
        stepped.append(logits_BV)

    column_L = np.arange(token_BL.shape[1])
    batch = {
        "decoder_input_tokens": token_BL,
        "decoder_target_tokens": (column_L < (length_B + NEW - 1)[:, None]).astype(np.int32),
    }
    if encodes:
        batch["encoder_input_tokens"] = source_BS
    if prefix:
        batch["decoder_causal_attention"] = (column_L < length_B[:, None]).astype(np.int32)
    whole_BLV = jax.jit(lambda params: model.apply({"params": params}, batch))(params)
    at_BN = length_B[:, None] - 1 + np.arange(NEW)
    whole_BNV = np.take_along_axis(np.asarray(whole_BLV), at_BN[..., None], axis=1)
    return np.stack(stepped, axis=1), whole_BNV


CASES = [
    (name, prefix)
    for name in PREDICTS_NEXT
    for prefix in sorted({False, not MODELS[name].has_encoder})
]


@pytest.mark.parametrize(("name", "prefix"), slow_unless(FAST, CASES))
def test_steps_equal_the_parallel_pass(name, prefix):
    config = MODELS[name]
    assert uncached_part(config, for_decoding(model_spec(config))) is None
    stepped, whole = steps_of(config, prefix)
    np.testing.assert_allclose(stepped, whole, atol=1e-4, rtol=1e-4)


PIECES = {
    "partial_rotary": ("llama3_1b", {"position": "rotary:fraction=0.5"}),
    "linear_rotary": ("llama3_1b", {"position": "rotary:scaling=linear,factor=4"}),
    "alibi": ("lm_tiny", {"position": "alibi"}),
    "sines": ("lm_tiny", {"position": "sinusoidal"}),
    "parallel_blocks": ("llama3_1b", {"parallel_blocks": "one_norm", "query_key_norm": True}),
    "rotary_cross": ("t5_1_1_tiny", {"position": "rotary:cross=true"}),
    "bias_per_layer": ("lm_tiny", {"position": "relative_per_layer"}),
    "weights": ("lm_tiny", {"attention_weights": "norm_squared_relu"}),
    **entries("DECODED_PIECES"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_steps_equal_the_parallel_pass_with_other_pieces(name):
    preset, changes = PIECES[name]
    config = replace(MODELS[preset], **changes)
    for prefix in {False, not config.has_encoder}:
        stepped, whole = steps_of(config, prefix)
        np.testing.assert_allclose(stepped, whole, atol=1e-4, rtol=1e-4)


def test_scanned_layers_decode_as_others():
    config = MODELS["llama3_1b"]
    params, prompts = TinyModel(config).params, [np.arange(3, 9), np.arange(5, 8)]
    decoding = Decoding(max_new_tokens=4)
    plain = Decoder(config, decoding)(params, prompts)
    scanned = Decoder(replace(config, scan_layers=True), decoding)(stack_layers(params), prompts)
    assert [each.ids.tolist() for each in plain] == [each.ids.tolist() for each in scanned]


WHOLE = [("lm_tiny", False), ("lm_tiny", True), ("t5_1_1_tiny", False)]


@pytest.mark.parametrize(("name", "prefix"), slow_unless(WHOLE[1:], WHOLE))
def test_whole_rows_give_the_same(name, prefix):
    stepped, whole = steps_of(MODELS[name], prefix, Uncached)
    np.testing.assert_allclose(stepped, whole, atol=1e-4, rtol=1e-4)
