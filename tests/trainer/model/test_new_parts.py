"""Parts defined outside of the package: their own code and one registration each, nothing else."""

import sys
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.extending import example
from tests.support.runs import config_of, program_of, updated
from tests.trainer.model.conftest import tiny_config
from trainer import config as configuration
from trainer.config.from_flags import build_config
from trainer.config.presets import model_preset
from trainer.decoding.decoder import Decoder, Decoding
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.huggingface import configs, names
from trainer.model.registry import MIXERS, SLOTS, register
from trainer.model.slot import Part
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, decayed, init_params, parameter_facts

pytestmark = pytest.mark.processes

MIXER = {"mixer": "average", "position": "absolute"}
OTHERS = {
    "norm": "magnitude", "position": "ramp", "feed_forward": "sines:width=16",
    "parametrisation": "small", "parallel_blocks": "halved",
}  # fmt: skip


@pytest.fixture(autouse=True)
def defined(monkeypatch):
    """Defines the parts of docs/extending.md, in a module each, where dataclasses look up types."""
    for slot in SLOTS.values():  # register for this test alone
        monkeypatch.setattr(slot, "own", dict(slot.own))
    modules = {}
    for name, heading in (("mixers", "A mixer"), ("others", "Other parts of a model")):
        modules[name] = sys.modules[name] = types.ModuleType(name)
        exec(example(heading), vars(modules[name]))
    return modules
    for name in modules:
        del sys.modules[name]


@pytest.fixture
def config():
    return replace(model_preset("lm_tiny"), **MIXER, max_positions=8, vocab_size=40)


@pytest.mark.parametrize("parts", [MIXER, OTHERS], ids=["mixer", "others"])
def test_a_model_of_them_trains(parts):
    flags = [f"--model.{slot}={name}" for slot, name in parts.items()]
    flags += ["--model.vocab_size=40", "--batch_size=2", "--optimizer.name=adamw"]
    flags += ["--optimizer.learning_rate=0.01", "--optimizer.schedule=constant"]
    tokens = jnp.tile(jnp.arange(1, 7), (2, 1))
    batch = {
        "decoder_input_tokens": jnp.roll(tokens, 1, axis=1).at[:, 0].set(0),
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": jnp.ones_like(tokens),
    }
    losses = updated(program_of(config_of(*flags, preset="lm_tiny")), [batch] * 20)[1]
    assert losses[-1] < 0.7 * losses[0]


def test_a_task_module_registers_them(tmp_path, monkeypatch):
    (tmp_path / "my_mixer.py").write_text(example("A mixer"))
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--model.mixer=average", "--model.position=absolute", "--task_module=my_mixer"]

    def forget():
        MIXERS.own.pop("average", None)
        sys.modules.pop("my_mixer", None)

    forget()
    configuration.save_config(*build_config("lm_tiny", [*flags, f"--model_dir={tmp_path}"]))
    forget()  # as in another process
    assert configuration.load_config(str(tmp_path))[0].model.mixer == "average"
    sys.modules.pop("my_mixer")


def test_each_fits_a_model_by_itself_and_checks_its_options():
    for slot, name in OTHERS.items():
        assert parameter_facts(model_spec(tiny_config("lm", **{slot: name})))
    with pytest.raises(ValueError, match="a part whose width is above 0"):
        tiny_config("lm", feed_forward="sines:width=0")


def test_a_mixer_decodes_without_a_cache(config):
    decoder = Decoder(config, Decoding(max_new_tokens=3))
    assert decoder.without_cache == "average"
    params = init_params(model_spec(config), jax.random.key(0))
    # As many tokens as the table has positions, the first 0 included.
    (found,) = decoder(params, [np.arange(3, 8)])
    tokens = jnp.array([[0, 3, 4, 5, 6, 7]])
    batch = {"decoder_input_tokens": tokens, "decoder_target_tokens": jnp.ones_like(tokens)}
    logits = build_model(model_spec(config)).apply({"params": params}, batch)
    assert found.ids[0] == jnp.argmax(logits[0, -1])


def test_a_mixers_parameters_are_scanned_counted_and_decayed(config):
    params = init_params(model_spec(replace(config, scan_layers=True)), jax.random.key(0))
    batch, length, width, layers = 2, 6, config.emb_dim, config.num_decoder_layers
    mixer = params["decoder"]["decoder"]["self_attention"]
    assert mixer["matrix"].shape == (width, layers, width)
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
def test_settings_that_a_mixer_does_not_support_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_a_mixers_export_is_refused_in_one_line(config):
    assert "mixer average" in configs.refusal(config, custom_code=True)
    with pytest.raises(UserError, match=r"^transformers has no counterpart for mixer average$"):
        names.places(config, "palimpsest")


def test_a_name_is_given_once(defined):
    with pytest.raises(ValueError, match="there is already a mixer called 'average'"):
        register("mixer", "average", Part(lambda config, options: defined["mixers"].AverageMixer()))


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
