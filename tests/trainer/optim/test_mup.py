"""muP: initial values, multipliers and rates of every tensor, and what optimizers make of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import slow_unless
from tests.support.totals import parameter_total
from trainer.config.optimizer import OptimizerConfig
from trainer.config.presets import MODEL_PRESETS
from trainer.model.config import ModelConfig
from trainer.model.layers import stack_layers
from trainer.model.parametrisation import UNCHANGED
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params, parameter_facts
from trainer.optim.optimizer import optimizer_of

WIDTH, BASE, HEAD_DIM, MLP = 256, 64, 64, 1024
SIZES = {"vocab_size": 512, "emb_dim": WIDTH, "num_heads": WIDTH // HEAD_DIM, "mlp_dim": MLP}
SIZES |= {"head_dim": HEAD_DIM, "num_encoder_layers": 0, "num_decoder_layers": 1}
PARTS = {"mlp_activations": ("relu",), "parametrisation": f"mup:base_width={BASE}"}
DECODER = ModelConfig(family="llama", **SIZES, **PARTS, attention_bias=True)
T5 = replace(DECODER, family="t5_1_1", num_encoder_layers=1, attention_bias=None)

# Source: the table of tensors in Lingle 2024 (arXiv:2404.05728): path -> initial deviation, rate by
# the relative and by the absolute rule.
TENSORS = {
    "token_embedder/embedding": (1.0, 1.0, 1.0),
    "self_attention/query/kernel": (WIDTH**-0.5, BASE / WIDTH, 1 / WIDTH),
    "self_attention/key/kernel": (WIDTH**-0.5, BASE / WIDTH, 1 / WIDTH),
    "self_attention/value/kernel": (WIDTH**-0.5, BASE / WIDTH, 1 / WIDTH),
    "self_attention/out/kernel": (WIDTH**-0.5, BASE / WIDTH, 1 / WIDTH),
    "mlp/wi/kernel": (WIDTH**-0.5, BASE / WIDTH, 1 / WIDTH),
    "mlp/wo/kernel": (MLP**-0.5, BASE / WIDTH, 1 / MLP),
    "logits_dense/kernel": (1 / WIDTH, BASE / WIDTH, 1 / WIDTH),
    "decoder_norm/scale": (0.0, 1.0, 1.0),
    "self_attention/query/bias": (0.0, 1.0, 1.0),
}


def mup(config: ModelConfig, **options: object) -> ModelConfig:
    if options.get("rule") != "absolute":
        options = {"base_width": BASE, **options}
    text = ",".join(f"{name}={value}" for name, value in options.items())
    return replace(config, parametrisation=f"mup:{text}")


def of_path(tree: dict, ending: str):
    (found,) = (leaf for path, leaf in tree.items() if path.endswith(ending))
    return found


@pytest.mark.parametrize(("rule", "column"), [("relative", 1), ("absolute", 2)])
def test_initial_deviations_and_rates_are_those_of_the_table(rule, column):
    spec = model_spec(mup(DECODER, rule=rule))
    params, facts = named(init_params(spec, jax.random.key(0))), parameter_facts(spec)
    for ending, row in TENSORS.items():
        deviation = float(jnp.std(of_path(params, ending)))
        assert deviation == pytest.approx(row[0], rel=0.02), ending
        assert of_path(facts, ending).rates.rate == pytest.approx(row[column]), ending


def test_logits_of_attention_are_divided_by_the_width_of_heads():
    spec = model_spec(DECODER)
    assert spec.shared.parametrisation.attention_scale(HEAD_DIM) == 1 / HEAD_DIM
    scaled = model_spec(replace(DECODER, attention_scale=HEAD_DIM**-0.5))
    assert scaled.shared.parametrisation.attention_scale(HEAD_DIM) == HEAD_DIM**-0.5


@pytest.mark.parametrize(
    ("readout", "deviation", "size"),
    [
        ("inverse", 1 / WIDTH, BASE / WIDTH),
        ("relative", BASE**0.5 / WIDTH, BASE / WIDTH),
        ("standard", WIDTH**-0.5, (BASE / WIDTH) ** 0.5),
        ("zero", 0.0, 1.0),
    ],
)
def test_readouts(readout, deviation, size):
    spec = model_spec(mup(DECODER, readout=readout))
    kernel = of_path(named(init_params(spec, jax.random.key(0))), "logits_dense/kernel")
    assert float(jnp.std(kernel)) == pytest.approx(deviation, rel=0.02)
    rates = of_path(parameter_facts(spec), "logits_dense/kernel").rates
    assert rates == (BASE / WIDTH, pytest.approx(size))


def test_tied_logits_fall_as_those_of_a_kernel():
    found = [
        model_spec(mup(replace(T5, tied_logits=True), readout=readout)).shared.parametrisation
        for readout in ("inverse", "relative", "standard")
    ]
    expected = [1 / WIDTH, BASE**0.5 / WIDTH, WIDTH**-0.5]
    assert [each.tied_logits_multiplier(WIDTH) for each in found] == pytest.approx(expected)


def test_rates_are_1_at_the_base_width_and_in_other_parametrisations():
    config = mup(replace(T5, emb_dim=BASE, num_heads=1, mlp_dim=4 * BASE), readout="relative")
    assert {facts.rates for facts in parameter_facts(model_spec(config)).values()} == {UNCHANGED}
    for name in ("standard", "normal"):
        facts = parameter_facts(model_spec(replace(T5, parametrisation=name)))
        assert {each.rates for each in facts.values()} == {UNCHANGED}


# ---- Optimizers. --------------------------------------------------------------------------------

RATE = BASE / WIDTH
PATHS = {
    "embedding": "token_embedder/embedding",
    "hidden": "mlp/wi/kernel",
    "logits": "logits_dense/kernel",
}


def update_of(config: ModelConfig, gradient_size: float = 1e-3, **settings):
    """Returns parameters, gradients and the first update, each by the words of PATHS."""
    spec = model_spec(config)
    params = init_params(spec, jax.random.key(0))
    random = np.random.default_rng(0)
    gradients = jax.tree.map(
        lambda leaf: jnp.asarray(gradient_size * random.normal(size=leaf.shape), jnp.float32),
        params,
    )
    defaults = {"learning_rate": 0.01, "schedule": "constant"}
    optimizer = optimizer_of(OptimizerConfig(**defaults | settings), spec)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    trees = [named(tree) for tree in (params, gradients, updates)]
    return {
        word: [np.asarray(of_path(tree, path), np.float64) for tree in trees]
        for word, path in PATHS.items()
    }


RATES = {"embedding": 1.0, "hidden": RATE, "logits": RATE}


@pytest.mark.parametrize("scale_epsilon", [False, True])
@pytest.mark.parametrize("independent", [False, True])
def test_adam_against_the_formula(scale_epsilon, independent):
    decay, epsilon = 0.1, 1e-3
    settings = {"weight_decay": decay, "no_weight_decay": (), "epsilon": epsilon, "name": "adamw"}
    settings |= {"independent_weight_decay": independent, "scale_epsilon": scale_epsilon}
    found = update_of(DECODER, **settings)
    for word, (param, gradient, update) in found.items():
        rate = RATES[word]
        adam = gradient / (np.abs(gradient) + epsilon * (rate if scale_epsilon else 1.0))
        decayed = decay * param if independent else 0.01 * rate * decay * param
        expected = -(0.01 * rate * adam + decayed)
        np.testing.assert_allclose(update, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_independent_decay_follows_the_schedule():
    settings = {"name": "adamw", "weight_decay": 0.1, "independent_weight_decay": True}
    schedule = {"schedule": "constant * linear_warmup", "warmup_steps": 4, "warmup_start": 0.25}
    found = update_of(DECODER, **settings, **schedule)
    param, gradient, update = found["hidden"]
    share = 0.25
    adam = gradient / (np.abs(gradient) + 1e-8)
    expected = -share * (0.01 * RATE * adam + 0.1 * param)
    np.testing.assert_allclose(update, expected, atol=1e-6)


def test_independent_decay_without_a_constant_factor_follows_the_rate():
    settings = {"name": "adamw", "weight_decay": 0.1, "independent_weight_decay": True}
    schedule = {"schedule": "linear_warmup", "warmup_steps": 4, "warmup_start": 0.25}
    param, gradient, update = update_of(DECODER, **settings, **schedule, learning_rate=None)[
        "hidden"
    ]
    adam = gradient / (np.abs(gradient) + 1e-8)
    np.testing.assert_allclose(update, -0.25 * (RATE * adam + 0.1 * param), atol=1e-6)


def test_lion_against_the_formula():
    for word, (_, gradient, update) in update_of(DECODER, name="lion", weight_decay=0.0).items():
        np.testing.assert_allclose(update, -0.01 * RATES[word] * np.sign(gradient), rtol=1e-6)


@pytest.mark.parametrize("name", ["adafactor", "adamw_rms"])
def test_updates_by_the_size_of_a_tensor_have_the_same_rate(name):
    """A kernel's size falls as the root of the width, so half of muP's rate is there already."""
    found = update_of(DECODER, name=name)
    for word, (param, _, update) in found.items():
        relative = np.sqrt((update**2).mean() / (param**2).mean()) / 0.01
        size = {"embedding": 1.0, "hidden": RATE**0.5, "logits": RATE}[word]
        assert relative == pytest.approx(RATES[word] / size, rel=0.05), word


@pytest.mark.processes
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion"])
def test_a_scan_makes_the_same_updates(name):
    assert_scanned(name)


def assert_scanned(name):
    config = replace(DECODER, num_decoder_layers=2)
    plain, scanned = (
        update_of_layers(replace(config, scan_layers=scan), name) for scan in (False, True)
    )
    for index in range(2):
        own = plain[f"decoder/layers_{index}/mlp/wi/kernel"]
        stacked = scanned["decoder/decoder/mlp/wi/kernel"][:, index]
        np.testing.assert_allclose(own, stacked, rtol=2e-4, atol=1e-7)


def update_of_layers(config: ModelConfig, name: str):
    plain = model_spec(replace(config, scan_layers=False))
    params = init_params(plain, jax.random.key(0))
    gradients = jax.tree.map(
        lambda leaf: 1e-3 * jnp.sin(jnp.arange(leaf.size) * 1.0).reshape(leaf.shape), params
    )
    if config.scan_layers:
        params, gradients = stack_layers(params), stack_layers(gradients)
    settings = {"learning_rate": 0.01, "schedule": "constant", "name": name}
    optimizer = optimizer_of(OptimizerConfig(**settings), model_spec(config))
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    return named(updates)


def test_the_standard_parametrisation_keeps_its_optimizer_state():
    """Rates add no leaves: checkpoints of both have the same ones."""
    counts = set()
    for config in (T5, replace(T5, parametrisation="standard")):
        spec = model_spec(config)
        params = jax.eval_shape(lambda spec=spec: init_params(spec, jax.random.key(0)))
        state = jax.eval_shape(optimizer_of(OptimizerConfig(), spec).init, params)
        counts.add(len(jax.tree.leaves(state)))
    assert len(counts) == 1


TOTALS = {128: 12_936_192, 256: 35_309_568, 512: 108_367_872, 1024: 367_730_688}
TOTALS |= {2048: 1_339_441_152, 4096: 5_094_801_408, 8192: 19_853_279_232}


@pytest.mark.parametrize(("width", "total"), slow_unless([*TOTALS.items()][:3], TOTALS.items()))
def test_published_totals(width, total):
    preset = MODEL_PRESETS[f"mup_dm{width}"]
    assert parameter_total(preset) == total
    assert parameter_total(replace(preset, num_decoder_layers=12)) == (
        2 * 32_100 * width + (total - 2 * 32_100 * width) // 2
    )
