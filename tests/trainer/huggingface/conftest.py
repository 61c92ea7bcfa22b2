"""Random models of every family that can be exported, and folders of transformers with them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from tests.support.cases import entries
from tests.trainer.huggingface.sizes import DECODER, T5
from trainer.config.presets import model_preset
from trainer.huggingface import configs, folding, names, parity, weights
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params

BERT = replace(model_preset("bert_tiny"), vocab_size=384, max_positions=64)
MODELS = {
    "t5_1_0": ModelConfig(family="t5_1_0", **T5),
    "t5_1_1": ModelConfig(family="t5_1_1", **T5 | {"num_encoder_layers": 3}),
    "t5_1_1_tied": ModelConfig(family="t5_1_1", tied_logits=True, **T5),
    # 250,112 ids, with the widths of tiny.
    "mt5": replace(model_preset("t5_1_1_tiny"), vocab_size=model_preset("mt5_base").vocab_size),
    "bert": BERT,
    "bert_untied": replace(BERT, tied_logits=False, mlp_activations=("gelu",)),
    "llama": ModelConfig(family="llama", **DECODER | {"num_decoder_layers": 2}),
    "llama_tied": ModelConfig(family="llama", tied_logits=True, **DECODER),
    "llama3": ModelConfig(family="llama", num_kv_heads=2, norm="rms_norm:epsilon=1e-5",
        position="rotary:base=500000,scaling=llama3,factor=4,original_positions=24",
        attention_bias=True, mlp_bias=True, **DECODER),
    "llama_linear": ModelConfig(family="llama", position="rotary:scaling=linear,factor=2",
        num_kv_heads=1, **DECODER),
    "umt5": ModelConfig(family="t5_1_1", position="relative_per_layer", **T5),
    "mup_decoder": ModelConfig(family="llama", norm="rms_norm:gain=none",
        parametrisation="mup:base_width=8", logits_scale=0.5, **DECODER),
    "mup_t5": ModelConfig(family="t5_1_1", parametrisation="mup:base_width=8", **T5),
    "mup_t5_tied": ModelConfig(family="t5_1_0", parametrisation="mup:readout=relative",
        norm="rms_norm:gain=scalar", **T5),
    "umt5_tied": ModelConfig(family="t5_1_0", position="relative_per_layer", **T5),
    "t5_unscaled": ModelConfig(family="t5_1_1", tied_logits=True, logits_scale=1.0, **T5),
    "t5_buckets": ModelConfig(family="t5_1_0", position="relative:num_buckets=16,max_distance=20",
        norm="rms_norm:epsilon=1e-5", **T5),
    "lm": ModelConfig(family="lm", **DECODER),
    "lm_untied": ModelConfig(family="lm", tied_logits=False, mlp_activations=("silu", "linear"),
        **DECODER),
    "t5_squared_relu": ModelConfig(family="t5_1_1", mlp_activations=("squared_relu",), **T5),
    **entries("EXPORTED"),
}  # fmt: skip


def random_params(config: ModelConfig, seed: int = 1):
    """Returns random parameters, including biases, scales and tables."""
    spec = model_spec(config)
    shapes = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = random.normal(size=leaf.shape).astype(np.float32)
        if path[-1].key == "scale":
            return 1 + 0.1 * noise
        if path[-1].key.startswith("tap_"):
            return noise
        if path[-1].key == "kernel":
            return noise / np.float32(leaf.shape[0] ** 0.5)
        return 0.5 * noise

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_batch(config: ModelConfig, rows: int = 4, length: int = 40):
    """Returns rows of different lengths, padded, and long enough that positions share buckets."""
    random = np.random.default_rng(2)
    lengths = np.linspace(length // 2, length, rows).astype(int)

    def tokens(size):
        ids = random.integers(3, 380, (rows, size))
        return np.where(np.arange(size) < np.minimum(lengths, size)[:, None], ids, 0)

    if not config.has_decoder:
        inputs = tokens(length)
        types = (np.arange(length) >= length // 3) & (inputs > 0)
        return {"encoder_input_tokens": inputs, "encoder_token_types": types.astype(np.int64)}
    targets = tokens(length - 7)
    batch = {
        "decoder_target_tokens": targets,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    }
    if config.has_both_stacks:
        batch["encoder_input_tokens"] = tokens(length)
    return batch


@cache
def our_logits(name: str):
    """Returns our logits of the random model and batch."""
    config = MODELS[name]
    return parity.our_logits(config, random_params(config))(random_batch(config))


class Exported:
    """A random model, and its export to a folder of transformers."""

    def __init__(self, name: str, folder):
        self.name, self.config, self.folder = name, MODELS[name], folder
        self.params = random_params(self.config)
        folder.mkdir()
        self.written = configs.to_config(self.config, 64, mt5=name == "mt5")
        model, kind = configs.exportable(self.config)
        params = self.params if model == self.config else folding.fold(self.params, self.config)
        self.tensors = names.to_tensors(params, model, kind)
        self.write(self.written, self.tensors)

    @property
    def batch(self):
        return random_batch(self.config)

    @property
    def logits(self):
        return our_logits(self.name)

    def write(self, written, tensors, shard_bytes=5 * 10**9):
        (self.folder / "config.json").write_text(json.dumps(written))
        weights.write(str(self.folder), tensors, shard_bytes)

    def parity(self, changed=None) -> parity.Parity:
        """Compares the folder, with `changed` fields in its configuration, with our model."""
        if changed:
            self.write({**self.written, **changed}, self.tensors)
        model = parity.their_model(str(self.folder), self.written)
        theirs = parity.their_logits(model)
        return parity.compare(lambda batch: self.logits, theirs, [self.batch])


@pytest.fixture
def exported(tmp_path):
    """Returns a function that exports a model of MODELS by its name."""
    return lambda name: Exported(name, tmp_path / name)


@pytest.fixture(scope="session")
def models():
    """Returns MODELS."""
    return MODELS
