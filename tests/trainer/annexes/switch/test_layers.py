"""Switch layers: formulas in NumPy in float64, and models with them."""

import dataclasses
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import config_of
from tests.trainer.model.conftest import TinyModel, unboxed
from trainer.annexes.switch.layers import DROPPED, Switch
from trainer.config import config_changes, stored_model
from trainer.config.from_flags import build_config
from trainer.config.mesh import check_dimensions
from trainer.config.presets import model_preset
from trainer.config.unused_fields import refuse_unread
from trainer.decoding.decoder import Decoder, Decoding
from trainer.engine.loss import model_loss, sown_loss
from trainer.model.dense import Shared
from trainer.model.feedforward import SOWN, Mlp, sown_of
from trainer.model.masks import Rows
from trainer.model.parametrisation import StandardParametrisation
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import SownLogits, init_params, rounded_kernels, run_model

B, L, D = 2, 8, 8
SHARED = Shared(D, 40, "float32", 0.0, StandardParametrisation())
# The second row has two packed examples and padding.
SEGMENTS = np.array([[1] * L, [1, 1, 1, 2, 2, 2, 2, 0]])
ROWS = Rows(jnp.asarray(SEGMENTS))
TOKEN = SEGMENTS > 0
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (6, 2, 4)]
ALL = {"feed_forward": "switch:experts=2,every=1"}


def states():
    return np.random.default_rng(0).normal(size=(B, L, D)).astype(np.float32)


def agree(output, expected):
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def run(spec, *arguments, **keywords):
    """Returns (parameters by path as float64, output) with random parameters."""
    module = spec.build(SHARED, "it")
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *arguments))["params"]
    random = np.random.default_rng(7)
    params = jax.tree.map(
        lambda leaf: (0.3 * random.normal(size=leaf.shape)).astype(np.float32), unboxed(shapes)
    )
    output = jax.jit(lambda p: module.apply({"params": p}, *arguments, **keywords))(params)
    return {path: leaf.astype(np.float64) for path, leaf in named(params).items()}, output


EXPERT = Mlp(6, ("squared_relu",), bias=False)


def switch(spec, training=False, x=None):
    x = states() if x is None else x
    keywords = {"mutable": [SOWN]}
    if training:
        keywords["rngs"] = {"dropout": jax.random.key(3)}
    p, (output, variables) = run(spec, x, ROWS, not training, **keywords)
    return p, np.asarray(output), sown_of(variables[SOWN])


def switch_by_definition(p, x, spec, capacity):
    """Returns (output, auxiliary loss, dropped) in NumPy; each row is a group."""
    x = np.where(TOKEN[..., None], x, 0.0)
    logits = x @ p["router/kernel"]
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    choice = probability.argmax(-1)
    output, dropped = np.zeros_like(x), 0
    for row in range(B):
        taken = [0] * spec.num_experts
        for at in np.flatnonzero(TOKEN[row]):
            expert = choice[row, at]
            taken[expert] += 1
            if taken[expert] > capacity:
                dropped += 1
                continue
            hidden = np.maximum(x[row, at] @ p["experts/wi/kernel"][expert], 0) ** 2
            through = hidden @ p["experts/wo/kernel"][expert]
            output[row, at] = probability[row, at, expert] * through
    share = np.stack([(choice == expert).mean(1) for expert in range(spec.num_experts)], 1)
    balance = (share * probability.mean(1)).mean()
    return output, 0.01 * spec.num_experts**2 * balance, dropped


def test_switch_layers_and_their_capacity():
    spec = Switch(EXPERT, 3, largest_group=L)
    p, output, sown = switch(spec)
    assert spec.capacity(L, training=False) == 5
    expected, auxiliary, dropped = switch_by_definition(p, states().astype(np.float64), spec, 5)
    agree(output, expected)
    agree(sown.loss, auxiliary)
    assert [*map(int, sown.metrics[DROPPED])] == [dropped, TOKEN.sum()]
    spec = Switch(EXPERT, 32)
    assert spec.group_size(128 * 512) == 1024
    assert spec.group_size(7 * 300) == 700
    assert spec.capacity(1024, training=True) == 40
    assert spec.capacity(1024, training=False) == 64
    assert spec.capacity(64, training=True) == 4


def test_tokens_of_full_experts_are_dropped():
    spec = Switch(EXPERT, 3, evaluation_capacity_factor=0.1, largest_group=L)
    # Proportional states all go to one expert.
    x = np.ones((B, L, D), np.float32) * np.linspace(1, 2, L, dtype=np.float32)[:, None]
    p, output, sown = switch(spec, x=x)
    expected, _, dropped = switch_by_definition(p, x.astype(np.float64), spec, 4)
    assert dropped == (L - 4) + (TOKEN[1].sum() - 4) == int(sown.metrics[DROPPED][0])
    agree(output, expected)
    assert not output[0, 4:].any()


def test_an_expert_takes_its_capacity_of_each_row():
    spec = Switch(EXPERT, 2, row_capacity=2, largest_group=1, evaluation_capacity_factor=0.1)
    p, output, sown = switch(spec)
    expected, auxiliary, dropped = switch_by_definition(p, states().astype(np.float64), spec, 2)
    assert dropped == int(sown.metrics[DROPPED][0]) > 0
    agree(output, expected)
    agree(sown.loss, auxiliary)
    for training in (False, True):
        assert dataclasses.replace(spec, row_capacity=64).capacity(L, training) == L


def test_routers_jitter_only_in_training():
    spec = dataclasses.replace(Switch(EXPERT, 3, largest_group=L), jitter=0.5)
    _, calm, _ = switch(spec)
    _, again, _ = switch(spec)
    _, shaken, _ = switch(spec, training=True)
    np.testing.assert_array_equal(calm, again)
    assert not np.allclose(calm, shaken, atol=1e-3)


def logits(tiny, inputs, segments):
    """Returns the logits of one row."""
    inputs, segments = ([[*part, *[0] * (6 - len(part))]] for part in (inputs, segments))
    batch = {
        "decoder_input_tokens": jnp.asarray(inputs),
        "decoder_target_tokens": (jnp.asarray(segments) > 0).astype(int),
        "decoder_segment_ids": jnp.asarray(segments),
    }
    output = jax.jit(lambda params: run_model(tiny.model, params, batch))(tiny.params)
    assert isinstance(output, SownLogits)
    return np.asarray(output.logits_BLV)[0]


def test_packed_rows_equal_rows_of_their_own(make_config):
    """With no more tokens than the capacity of one expert."""
    tiny = TinyModel(make_config("lm", **ALL))
    packed = logits(tiny, [0, 12, 0, 15], [1, 1, 2, 2])
    alone = [logits(tiny, example, [1, 1])[:2] for example in ([0, 12], [0, 15])]
    np.testing.assert_allclose(packed[:4], np.concatenate(alone), atol=2e-6)


def test_every_nth_layer_of_both_stacks_routes_its_tokens(make_config):
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    tiny = TinyModel(make_config("t5_1_1", feed_forward="switch:experts=2,every=2", **layers))
    for stack in ("encoder", "decoder"):
        assert "wo" in tiny.params[stack]["layers_0"]["mlp"]
        assert {*tiny.params[stack]["layers_1"]["mlp"]} == {"experts", "router"}
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = dict.fromkeys(names, jnp.full((2, 4), 3))
    output = jax.jit(lambda params: run_model(tiny.model, params, batch))(tiny.params)
    assert int(output.sown.metrics[DROPPED][1]) == 16
    loss = model_loss(tiny.model)
    assert loss.of_batch is sown_loss
    assert loss.metrics[-2:] == ("auxiliary_loss", DROPPED)


def test_routers_stay_in_float32(make_config):
    spec = model_spec(make_config("t5_1_1", dtype="bfloat16", **ALL))
    params = init_params(spec, jax.random.key(0))
    for path, leaf in named(rounded_kernels(spec, params)).items():
        rounded = path.endswith("kernel") and "router" not in path
        assert leaf.dtype == (jnp.bfloat16 if rounded else jnp.float32), path


def test_full_experts_of_others_change_nothing(make_config):
    config = make_config("lm", **ALL)
    params = TinyModel(config).params
    prompts = [np.full(8, 7, np.int32)] * 12 + PROMPTS
    decoder = Decoder(config, Decoding(max_new_tokens=5))
    alone, together = decoder(params, PROMPTS), decoder(params, prompts)[12:]
    assert [each.ids.tolist() for each in alone] == [each.ids.tolist() for each in together]


def test_a_prompt_finds_no_expert_full(make_config):
    config = make_config("lm", **ALL)
    params = TinyModel(config).params
    few, all_tokens = (
        Decoder(replace(config, feed_forward=text), Decoding(max_new_tokens=5))
        for text in (f"{config.feed_forward},capacity=1", config.feed_forward)
    )
    for one, other in zip(few(params, PROMPTS), all_tokens(params, PROMPTS), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.score == other.score


def test_what_experts_say_of_a_run():
    few = "--model.num_encoder_layers=2", "--model.num_decoder_layers=3"
    config, origins = build_config("t5_1_1_tiny", ["--model.feed_forward=switch", *few])
    with pytest.raises(UserError, match=r"feed_forward has no effect .*4 layers, so none has exp"):
        refuse_unread(config, origins)
    refuse_unread(config, {})
    refuse_unread(*build_config("t5_1_1_tiny", ["--model.feed_forward=switch:every=3", *few]))
    flags = ["--model.feed_forward=switch:experts=4,every=1"]
    (change,) = config_changes(config_of(*flags), config_of("--microbatches=2", *flags), step=5)
    assert change.startswith("microbatches was 1, is 2, and tokens are routed to experts within")
    sizes = {"data": 2, "fsdp": 1, "tensor": 1}
    model = replace(model_preset("t5_1_1_tiny"), feed_forward="switch:experts=5")
    with pytest.raises(UserError, match="experts 5 is not divisible by 2"):
        check_dimensions(sizes, "standard", model, [8], 1)


def test_fields_of_earlier_versions_are_read():
    stored = dataclasses.asdict(model_preset("lm_tiny"))
    for experts, every, capacity, expected in (
        (0, 4, None, "mlp"),
        (8, 4, None, "switch"),
        (4, 2, 64, "switch:experts=4,every=2,capacity=64"),
    ):
        old = {"num_experts": experts, "switch_every": every, "expert_capacity": capacity}
        assert stored_model({**stored, **old}, "x").feed_forward == expected
