"""Checks of every preset at sizes for a test: visibility, packing, scans, bfloat16, devices.

Presets that differ only in their sizes are tested once. Tests that are not slow take the presets
that are the first to have a part of their own, whatever their norms, activations and scales are.
"""

import contextlib
import functools
import itertools
import json
import re
from dataclasses import fields, replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import eight_devices
from tests.support.parameters import slow_unless
from tests.support.runs import config_of, program_of, updated
from tests.trainer.model.conftest import TinyModel
from tests.trainer.model.visibility import DECODER_SEGMENTS, ENCODER_SEGMENTS, check
from trainer.config.presets import MODEL_PRESETS
from trainer.model.config import ModelConfig
from trainer.model.layers import stack_layers

pytestmark = pytest.mark.processes

VOCAB_SIZE, LENGTH = 48, 8
SIZES = {"vocab_size": VOCAB_SIZE, "emb_dim": 16, "num_heads": 4, "head_dim": 8, "mlp_dim": 24}
SIZES |= {"max_positions": 16, "dropout_rate": 0.0}


def routes(config: ModelConfig) -> bool:
    """Returns whether rows of a batch depend on one another."""
    return bool(config.facts("feed_forward").couples)


def shrunk(config: ModelConfig) -> ModelConfig:
    """Returns a model with the parts of `config` and two layers in each of its stacks."""
    kv_heads = config.num_kv_heads
    mixer, pattern, window = config.mixer, config.attention_pattern, config.attention_window
    return replace(
        config,
        **SIZES,
        mixer=mixer and mixer.replace("conditional_heads=6", "conditional_heads=2"),
        attention_pattern=pattern.replace("block=16", "block=2"),
        attention_window=functools.reduce(
            lambda text, change: re.sub(*change, text),
            (
                (r"window=\d+,layers=\w+", "window=3,layers=lg"),
                (r"window=\d+,decoder", "window=3,decoder"),
                ("transient_global", "transient_global:window=3,block=2"),
            ),
            window,
        ),
        feed_forward=re.sub(":.*", ":experts=2,every=1" * routes(config), config.feed_forward),
        stack_parts=re.sub(r"count=\d+", "count=2", config.explicit().stack_parts),
        num_encoder_layers=2 * bool(config.num_encoder_layers),
        num_decoder_layers=2 * bool(config.num_decoder_layers),
        num_kv_heads=kv_heads and (1 if kv_heads == 1 else 2),
        logits_scale=None,
        encoder_sizes=("mlp_dim=40", "num_heads=2") if config.encoder_sizes else (),
    )


KINDS = {}
for _name, _config in MODEL_PRESETS.items():
    KINDS.setdefault(shrunk(_config), _name)
NAMES = list(KINDS.values())
MODELS = {name: config for config, name in KINDS.items()}
PREDICTS_NEXT = [name for name in NAMES if MODELS[name].has_decoder]


# Fields of which attention, packing and scans know nothing.
UNRELATED = {
    *("attention_bias", "attention_out_bias", "attention_scale", "attention_softcap"),
    *("head_bias", "logits_softcap", "mlp_activations", "mlp_bias", "norm"),
    *("num_kv_heads", "parametrisation", "query_key_norm", "query_key_norm_over"),
    *("softmax_dtype", "tied_logits", "token_types"),
}
# Fields whose values are a kind and its numbers, as "rotary:base=500000,factor=8".
KINDS_OF = ("mixer", "position", "attention_window", "stack_parts")


def first_of_their_parts() -> set[str]:
    """Returns the presets with a value of a field, or a kind, that no preset before them has."""
    names, seen = set(), set()
    for name, config in MODELS.items():
        parts = {(f.name, getattr(config, f.name)) for f in fields(config)}
        parts = {
            (field, str(value).partition(":")[0] if field in KINDS_OF else value)
            for field, value in parts
        } - seen
        seen |= parts
        if any(field not in UNRELATED for field, _ in parts):
            names.add(name)
    return names


FIRST = first_of_their_parts()
# Those of which packed rows are compared with rows of another length, too.
UNPADDED = ("t5_1_1_tiny", "lm_tiny", "llama_tiny", "gpt2_small", "bert_tiny")


def scans(config: ModelConfig) -> bool:
    """Returns whether the layers of a model can be scanned."""
    with contextlib.suppress(ValueError):
        return replace(config, scan_layers=True).scan_layers
    return False


ALIKE = [name for name in NAMES if scans(MODELS[name])]
# Packed examples compete for the places of an encoder that drops tokens, memory tokens refuse them,
# and blocks of a pattern are counted along the row.
SEES_ALL = [
    name
    for name, config in MODELS.items()
    if not any(each.reads_weights or config.unpackable for each in config.stack_facts.values())
    and config.attention_pattern == "full"
]
# A full expert takes no more tokens.
PACKS = [name for name in SEES_ALL if not routes(MODELS[name])]
# What MARCH's models see, and their packed rows, test_march_models.py has, too.
FIRST_SEEN = {name for name in FIRST if not name.startswith("march_")}


tiny_of = functools.cache(TinyModel)


def batch_of(config: ModelConfig, rows: int = 8) -> dict[str, np.ndarray]:
    """Returns rows of two packed examples each."""
    random = np.random.default_rng(0)
    segments = np.tile(np.repeat([1, 2], LENGTH // 2), (rows, 1))
    targets = np.tile(np.arange(3, 3 + LENGTH), (rows, 1)) + random.integers(0, 8, (rows, 1))
    batch = {}
    if config.num_encoder_layers:
        batch["encoder_input_tokens"] = random.integers(3, VOCAB_SIZE, (rows, LENGTH))
        batch["encoder_segment_ids"] = segments
    if config.num_decoder_layers:
        inputs = np.where(np.arange(LENGTH) % (LENGTH // 2), np.roll(targets, 1, axis=1), 0)
        batch |= {
            "decoder_input_tokens": inputs,
            "decoder_target_tokens": targets,
            "decoder_segment_ids": segments,
            "decoder_loss_weights": np.ones_like(targets),
        }
    else:
        batch |= {"encoder_target_tokens": targets, "encoder_loss_weights": np.ones_like(targets)}
    return {
        name: array.astype(np.int32)
        for name, array in batch.items()
        if not (config.unpackable and name.endswith("segment_ids"))
    }


@pytest.mark.parametrize(
    "name", slow_unless(FIRST_SEEN, [name for name in SEES_ALL if name in PREDICTS_NEXT])
)
def test_positions_see_what_they_may(name, batch):
    config = MODELS[name]
    encoders = min(config.num_encoder_layers, 1)  # the layers of these presets see alike
    model = tiny_of(
        replace(config, tied_logits=False, num_encoder_layers=encoders, num_decoder_layers=1)
    )
    batch["encoder_segment_ids"] = jnp.asarray([ENCODER_SEGMENTS])
    batch["decoder_segment_ids"] = jnp.asarray([DECODER_SEGMENTS])
    check(model, batch, ENCODER_SEGMENTS, DECODER_SEGMENTS)


def logits(model, batch, params=None):
    output = model.apply(batch, params)
    return np.asarray(output[0] if isinstance(output, tuple) else output)


def alone(rows, half):
    """Returns the two examples of a packed row as rows of their own, padded to its length."""
    shape = (2, rows.shape[1] - half)
    return np.concatenate([rows.reshape(2, half), np.zeros(shape, rows.dtype)], axis=1)


@pytest.mark.parametrize(
    ("name", "padded"),
    slow_unless(
        {*((name, True) for name in FIRST_SEEN), *((name, False) for name in UNPADDED)},
        itertools.product(PACKS, (False, True)),
    ),
)
def test_packed_rows_equal_rows_of_their_own(name, padded):
    """Padded ones have the shape of the packed row and one segment, others have no segments."""
    config, half = MODELS[name], LENGTH // 2
    model, packed = tiny_of(config), batch_of(config, rows=2)
    if padded:
        apart = {name: alone(array[:1], half) for name, array in packed.items()}
        for name in apart:
            if name.endswith("segment_ids"):
                apart[name] = np.minimum(apart[name], 1)
    else:
        apart = {
            name: np.concatenate([array[:1, :half], array[:1, half:]])
            for name, array in packed.items()
            if not name.endswith("segment_ids")
        }
    together, found = logits(model, packed)[0], logits(model, apart)[:, :half]
    np.testing.assert_allclose(together, found.reshape(together.shape), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", slow_unless(FIRST, ALIKE))
def test_a_scan_equals_a_loop(name):
    config = MODELS[name]
    batch, model = batch_of(config, rows=2), tiny_of(config)
    scanned = TinyModel(replace(config, scan_layers=True))
    loop, scan = logits(model, batch), logits(scanned, batch, stack_layers(model.params))
    np.testing.assert_allclose(loop, scan, atol=2e-5, rtol=2e-5)


def losses_of(name: str, steps: int, *flags: str) -> list[float]:
    """Returns the loss of each update of a shrunk preset that learns by Adam."""
    flags = (
        *("--batch_size=8", "--optimizer.name=adamw", "--optimizer.learning_rate=0.01"),
        *("--optimizer.schedule=constant", *flags),
    )
    config = config_of(*flags, preset=name)
    model = replace(MODELS[name], dtype=config.model.dtype)
    return updated(program_of(replace(config, model=model)), [batch_of(model)] * steps)[1]


@pytest.mark.parametrize("name", slow_unless({"bert_tiny", "tiny_primer"}, NAMES))
def test_bfloat16_learns(name):
    losses = losses_of(name, 40, "--model.dtype=bfloat16")
    assert losses[-1] < 0.8 * losses[0], losses


MESH = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2")


@pytest.mark.slow
def test_eight_devices_equal_one():
    for name, eight in eight_devices.run(__file__, timeout=3000).items():
        np.testing.assert_allclose(eight, losses_of(name, 3), rtol=1e-5, err_msg=name)


if __name__ == "__main__":
    print(json.dumps({name: losses_of(name, 3, *MESH) for name in NAMES}))
