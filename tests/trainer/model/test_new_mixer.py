"""A mixer defined outside of the package: its own code and one registration, nothing else."""

import os
import pathlib
import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.extending import example
from tests.support.processes import started
from trainer.config.from_flags import build_config
from trainer.config.presets import model_preset
from trainer.decoding.decoder import Decoder, Decoding
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.engine.program import Program
from trainer.huggingface import configs, names
from trainer.model.parts import MIXERS, register
from trainer.model.slots import Part
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, decayed, init_params
from trainer.t5x import write

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def mixer():
    module = types.ModuleType("average_mixer")
    sys.modules[module.__name__] = module  # where dataclasses look up types
    exec(example("A mixer"), vars(module))
    yield module.AverageMixer
    del sys.modules[module.__name__]
    del MIXERS["average"]


# ---- Its behaviour in the package. --------------------------------------------------------------


@pytest.fixture
def config():
    changes = {"mixer": "average", "position": "absolute", "max_positions": 8, "vocab_size": 40}
    return replace(model_preset("lm_tiny"), **changes)


def test_it_trains():
    flags = ["--model.mixer=average", "--model.position=absolute", "--model.vocab_size=40"]
    flags += ["--batch_size=2", "--optimizer.name=adamw", "--optimizer.learning_rate=0.01"]
    flags += ["--optimizer.schedule=constant"]
    program = Program(SimpleNamespace(config=build_config("lm_tiny", flags)[0]))
    state, losses = program.initial_state(), []
    tokens = jnp.tile(jnp.arange(1, 7), (2, 1))
    batch = {
        "decoder_input_tokens": jnp.roll(tokens, 1, axis=1).at[:, 0].set(0),
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": jnp.ones_like(tokens),
    }
    for _ in range(20):
        state = program.train_step(state.replace(metrics=program.zero_metrics()), batch)
        total, weight = state.metrics["loss"]
        losses.append(float(total / weight))
    assert losses[-1] < 0.7 * losses[0]


def test_a_task_module_registers_it(tmp_path):
    (tmp_path / "my_mixer.py").write_text(example("A mixer"))
    (tmp_path / "run").mkdir()
    flags = ["--model.mixer=average", "--model.position=absolute", "--task_module=my_mixer"]
    save = f"""
from trainer import config
from trainer.config import from_flags
built, origins = from_flags.build_config("lm_tiny", {[*flags, "--model_dir=run"]})
config.save_config(built, origins)
"""
    load = "from trainer import config; print(config.load_config('run')[0].model.mixer)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = [
        started("-c", code, cwd=tmp_path, env=environment, check=True).stdout
        for code in (save, load)
    ]  # fmt: skip
    assert shown == ["", "average\n"]


def test_it_decodes_without_a_cache(config):
    decoder = Decoder(config, Decoding(max_new_tokens=3))
    assert decoder.without_cache == "average"
    params = init_params(model_spec(config), jax.random.key(0))
    # As many tokens as the table has positions, the first 0 included.
    (found,) = decoder(params, [np.arange(3, 8)])
    tokens = jnp.array([[0, 3, 4, 5, 6, 7]])
    batch = {"decoder_input_tokens": tokens, "decoder_target_tokens": jnp.ones_like(tokens)}
    logits = build_model(model_spec(config)).apply({"params": params}, batch)
    assert found.ids[0] == jnp.argmax(logits[0, -1])


def test_it_runs_in_a_scan(config):
    params = init_params(model_spec(replace(config, scan_layers=True)), jax.random.key(0))
    width, layers = config.emb_dim, config.num_decoder_layers
    mixer = params["decoder"]["decoder"]["self_attention"]
    assert mixer["matrix"].shape == (width, layers, width)


def test_its_parameters_and_operations_are_counted(config):
    batch, length, width, layers = 2, 6, config.emb_dim, config.num_decoder_layers
    plain = replace(config, mixer=None)
    attention = 4 * width * config.num_heads * config.head_dim
    more = layers * (width * width + 2 * width - attention)
    assert parameter_count(config) - parameter_count(plain) == more
    # The gate and the matrix are multiplied at every position; the shift is added.
    products = layers * (width * width + width - attention)
    pairs = layers * 2 * config.num_heads * config.head_dim * length
    expected = 6 * batch * length * (products - pairs)
    found = flops_per_step(config, batch, 0, length) - flops_per_step(plain, batch, 0, length)
    assert found == expected


def test_weight_decay_spares_what_it_declares(config):
    mixer = decayed(model_spec(config))["decoder"]["layers_0"]["self_attention"]
    assert mixer == {"gate": False, "shift": False, "matrix": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "cudnn", "dtype": "bfloat16"}, "mixer is 'average'; .* attention 'cudnn'"),
        ({"attention": "dot_product"}, "mixer is 'average'; .* attention 'dot_product'"),
        ({"position": "rotary"}, "position is 'rotary'; .*'absolute' with mixer 'average'"),
        ({"position": None, "max_positions": 512}, "position is None; .*with mixer 'average'"),
        ({"upstream_compat": True}, "upstream_compat is True"),
    ],
)
def test_settings_that_it_does_not_support_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_its_export_is_refused_in_one_line(config):
    assert "mixer average" in configs.refusal(config, custom_code=True)
    with pytest.raises(UserError, match=r"^transformers has no counterpart for mixer average$"):
        names.places(config, "palimpsest")
    assert any("--model.mixer=average" in problem for problem in write.unsupported(config))


def test_a_name_is_given_once(mixer):
    with pytest.raises(ValueError, match="there is a mixer called 'average' already"):
        register("mixer", "average", Part(lambda config, options: mixer()))


def test_packed_examples_do_not_see_one_another(config):
    spec = model_spec(config)
    params = init_params(spec, jax.random.key(0))
    batch = {
        "decoder_input_tokens": np.array([[0, 5, 6, 0, 7, 8]]),
        "decoder_target_tokens": np.array([[5, 6, 7, 7, 8, 9]]),
        "decoder_segment_ids": np.array([[1, 1, 1, 2, 2, 2]]),
    }
    model = build_model(spec)
    together = model.apply({"params": params}, batch)[0, 3:]
    alone = {name: array[:, 3:] for name, array in batch.items()}
    np.testing.assert_allclose(together, model.apply({"params": params}, alone)[0], atol=1e-5)
