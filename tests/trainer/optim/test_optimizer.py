"""Optimizers against float64 numpy written from the papers; what T5X made is in tests/golden."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec

from tasks import annexes
from tests.support.parameters import slow_unless
from tests.support.trees import assert_equal
from trainer.config.optimizer import OPTIMIZERS, OptimizerConfig
from trainer.config.presets import MODEL_PRESETS
from trainer.model.paths import named, path_name
from trainer.model.spec import model_spec
from trainer.model.transformer import decayed, init_params, logical_axes
from trainer.optim.optimizer import make_optimizer, weight_decay_mask

STEPS = 5
# A tensor of each kind; sizes differ by orders of magnitude, as they do in T5.
SHAPES = {
    "decoder/layers_0/mlp/wi/kernel": (8, 12),
    "decoder/layers_0/mlp/wo/kernel": (12, 8),
    "decoder/layers_0/self_attention/query/kernel": (8, 8),
    "decoder/layers_0/pre_mlp_layer_norm/scale": (8,),
    "decoder/layers_0/mlp/wi/bias": (12,),
    "decoder/relpos_bias/rel_embedding": (3, 8),
    "decoder/logits_dense/kernel": (8, 16),
    "token_embedder/embedding": (16, 8),
}
SPARED = ("bias", "scale", "embedding", "rel_embedding")
RNG = np.random.default_rng(0)
PARAMS = {
    name: (RNG.normal(size=shape) * 10.0 ** (index % 4 - 2)).astype(np.float32)
    for index, (name, shape) in enumerate(SHAPES.items())
}
GRADIENTS = [
    {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    for _ in range(STEPS)
]
SCHEDULE = {"schedule": "constant * linear_warmup", "warmup_steps": 3, "learning_rate": 0.01}
RATES = [max(1e-8, 0.01 * min(1.0, step / 3)) for step in range(STEPS)]


def nested(flat):
    return unflatten_dict(flat, sep="/")


def flattened(tree):
    return {path: np.asarray(leaf) for path, leaf in named(tree).items()}


def decayed_by_name(params):
    """Weight decay as a model with these parameters declares it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path_name(path).endswith(SPARED), params
    )


def train(config, params, gradients, axes=None):
    """Parameters after all steps, and the optimizer's state."""
    optimizer = make_optimizer(config, axes, decayed_by_name)
    params = jax.tree.map(jnp.asarray, nested(params))
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = step(nested(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return flattened(params), state


def rms(x):
    return np.sqrt(np.mean(x * x))


def adafactor(
    p, gradients, *, factor_from, decay_rate=0.8, offset=0, momentum=0.0, clip=1.0,
    scaled=True, largest=np.inf, decay=0.0, exponent=0.0, rates=RATES,
):  # fmt: skip
    factored = p.ndim == 2 and min(p.shape) >= factor_from
    row = column = v = m = 0.0
    for step, g in enumerate(gradients):
        beta = 1 - (step - offset + 1.0) ** -decay_rate
        square = g * g + 1e-30
        if factored:
            row = beta * row + (1 - beta) * square.mean(1)
            column = beta * column + (1 - beta) * square.mean(0)
            v = np.outer(row, column) / row.mean()
        else:
            v = beta * v + (1 - beta) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, rms(u) / clip)
        u = u * rates[step] * (min(max(rms(p), 1e-3), largest) if scaled else 1.0)
        m = momentum * m + (1 - momentum) * u
        p = p - m - decay * rates[step] ** exponent * p
    return p


def adamw(p, gradients, *, betas=(0.9, 0.999), epsilon=1e-8, decay=0.0, scaled=False):
    m = v = 0.0
    for step, g in enumerate(gradients):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        u = m / (1 - betas[0] ** (step + 1))
        u = u / (np.sqrt(v / (1 - betas[1] ** (step + 1))) + epsilon)
        u = u * (max(rms(p), 1e-3) if scaled else 1.0)
        p = p - RATES[step] * (u + decay * p)
    return p


def lion(p, gradients, *, betas=(0.9, 0.99), decay=0.0):
    m = 0.0
    for step, g in enumerate(gradients):
        u = np.sign(betas[0] * m + (1 - betas[0]) * g)
        m = betas[1] * m + (1 - betas[1]) * g
        p = p - RATES[step] * (u + decay * p)
    return p


def spared(name):
    return name.rpartition("/")[2] in SPARED


# The optimizers of no annex.
OURS = set(OPTIMIZERS) - set(annexes.entries("optimizers"))
# Configuration fields, and name of a tensor -> its reference.
CASES = {
    "adafactor": ({"min_dim_size_to_factor": 8}, lambda name: (adafactor, {"factor_from": 8})),
    "adafactor-unfactored": ({}, lambda name: (adafactor, {"factor_from": 128})),
    "adafactor-options": (
        {"min_dim_size_to_factor": 8, "decay_rate": 0.7, "step_offset": -3, "beta1": 0.9}
        | {"clipping_threshold": 1.5, "maximum_parameter_scale": 0.5, "weight_decay": 0.3},
        lambda name: (
            adafactor,
            {"factor_from": 8, "decay_rate": 0.7, "offset": -3, "momentum": 0.9}
            | {"clip": 1.5, "largest": 0.5, "decay": 0.3},
        ),
    ),
    "adafactor-unscaled": (
        {"multiply_by_parameter_scale": False, "weight_decay": 0.5}
        | {"weight_decay_rate_exponent": 2.0, "no_weight_decay": ("scale$",)},
        lambda name: (
            adafactor,
            {"factor_from": 128, "scaled": False, "exponent": 2.0}
            | {"decay": 0.0 if name.endswith("scale") else 0.5},
        ),
    ),
    "adamw": (
        {"name": "adamw", "weight_decay": 0.1},
        lambda name: (adamw, {"decay": 0.0 if spared(name) else 0.1}),
    ),
    "adamw_rms": (
        {"name": "adamw_rms", "beta1": 0.8, "beta2": 0.95},
        lambda name: (adamw, {"betas": (0.8, 0.95), "epsilon": 1e-6, "scaled": True}),
    ),
    "lion": (
        {"name": "lion", "weight_decay": 0.1},
        lambda name: (lion, {"decay": 0.0 if spared(name) else 0.1}),
    ),
}


def test_every_optimizer_has_a_reference():
    assert {fields.get("name", "adafactor") for fields, _ in CASES.values()} == OURS


@pytest.mark.parametrize("clip_norm", [None, 2.0])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_the_papers(case, clip_norm):
    assert_steps(*CASES[case], clip_norm)


def assert_steps(fields, reference, clip_norm=None):
    config = OptimizerConfig(**{**SCHEDULE, **fields, "clip_norm": clip_norm})
    ours, _ = train(config, PARAMS, GRADIENTS)
    shrink = [1.0] * STEPS
    if clip_norm is not None:
        norms = [
            np.sqrt(sum(np.sum(np.square(g, dtype=float)) for g in s.values())) for s in GRADIENTS
        ]
        assert min(norms) > clip_norm
        shrink = [clip_norm / norm for norm in norms]
    for name, start in PARAMS.items():
        function, options = reference(name)
        gradients = [g[name].astype(float) * s for g, s in zip(GRADIENTS, shrink, strict=True)]
        expected = function(start.astype(float), gradients, **options)
        assert np.abs(expected - start).max() > 1e-5, name
        error = np.abs(ours[name] - expected).max()
        # The second part is optax's, which raises Adam's betas to the step in float32.
        tolerance = 1e-6 * np.abs(expected).max() + 1e-5 * np.abs(expected - start).max()
        assert error <= tolerance, (name, error, tolerance)


# Tensors of layers, stacked where T5X puts the axis of a scan: after the first. There are more
# layers than a tensor has rows or columns, so that size alone would factor over them.
LAYERS = 13
STACKED_SHAPES = {
    "layers/mlp/wi/kernel": ((8, 12), ("embed", "layers", "mlp")),
    "layers/mlp/wo/kernel": ((12, 8), ("mlp", "layers", "embed")),
    "layers/mlp/thin/kernel": ((8, 5), ("embed", "layers", "mlp")),
    "layers/norm/scale": ((8,), ("embed", "layers")),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_a_stack_of_layers_is_updated_as_its_layers_are(case):
    assert_stacked(CASES[case][0])


def assert_stacked(fields):
    config = OptimizerConfig(**{**SCHEDULE, **fields})
    rng = np.random.default_rng(1)

    def draw():
        # Layers of different sizes: a mean over all of them would show.
        return {
            name: [
                (rng.normal(size=shape) * 10.0 ** (layer % 3)).astype(np.float32)
                for layer in range(LAYERS)
            ]
            for name, (shape, _) in STACKED_SHAPES.items()
        }

    def stacked(layers):
        return {name: np.stack(tensors, axis=1) for name, tensors in layers.items()}

    def apart(layers):
        return {
            f"{name.replace('layers', f'layers_{layer}')}": tensor
            for name, tensors in layers.items()
            for layer, tensor in enumerate(tensors)
        }

    params, gradients = draw(), [draw() for _ in range(STEPS)]
    axes = nested({name: PartitionSpec(*axes) for name, (_, axes) in STACKED_SHAPES.items()})
    scanned, _ = train(config, stacked(params), [stacked(g) for g in gradients], axes)
    unscanned, _ = train(config, apart(params), [apart(g) for g in gradients])
    for name, stack in scanned.items():
        for layer in range(LAYERS):
            alone = unscanned[name.replace("layers", f"layers_{layer}")]
            np.testing.assert_allclose(stack[:, layer], alone, 1e-6, 1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "axes", "row", "column"),
    [
        ((16, 24), None, (16,), (24,)),
        ((8, 16, 12), PartitionSpec("embed", "layers", "mlp"), (8, 16), (16, 12)),
        # A dimension is too small.
        ((7, 24), None, (1,), (1,)),
        ((40,), None, (1,), (1,)),
        ((8, 16), PartitionSpec("embed", "layers"), (1,), (1,)),
    ],
)
def test_tensors_with_two_large_dimensions_are_factored(shape, axes, row, column):
    """The axis of a stack is none of them, and factors keep it."""
    config = OptimizerConfig(min_dim_size_to_factor=8)
    state = make_optimizer(config, axes and {"it": axes}, decayed_by_name).init(
        {"it": jnp.ones(shape)}
    )
    moments = next(part for part in state if hasattr(part, "v_row"))
    assert (moments.v_row["it"].shape, moments.v_col["it"].shape) == (row, column)
    assert moments.v["it"].shape == (shape if row == (1,) else (1,))


def test_experts_are_kept_apart_by_factoring_only():
    """The two largest of three axes that stack no layers are factored, as in optax."""
    params = {"kernel": jnp.ones((4, 16, 24))}
    gradient = {"kernel": jnp.asarray(RNG.normal(size=(4, 16, 24)), jnp.float32)}
    config = OptimizerConfig(min_dim_size_to_factor=16, learning_rate=0.1, schedule="constant")
    theirs = optax.adafactor(0.1, min_dim_size_to_factor=16)
    updates, _ = make_optimizer(config).update(
        gradient, make_optimizer(config).init(params), params
    )
    expected, _ = theirs.update(gradient, theirs.init(params), params)
    np.testing.assert_allclose(updates["kernel"], expected["kernel"], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_state_is_float32_and_as_large_as_its_moments(name):
    config = OptimizerConfig(name=name, learning_rate=0.1)
    _, state = train(config, PARAMS, GRADIENTS[:2])
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert {str(leaf.dtype) for leaf in leaves} == {"float32", "int32"}
    counts = [int(leaf) for leaf in leaves if leaf.dtype == jnp.int32]
    assert counts
    assert set(counts) == {2}
    # Elements of moments for each element of a parameter; what is left over are dummies.
    moments = {"adafactor": 1, "lion": 1, "adamw": 2, "adamw_rms": 2}
    size = sum(leaf.size for leaf in leaves if leaf.size > 3)
    total = sum(p.size for p in PARAMS.values())
    assert size == moments[name] * total


@pytest.mark.parametrize("name", ["bert_tiny", "t5_1_1_tiny"])
def test_what_is_no_kernel_is_not_decayed_by_default(name):
    assert OptimizerConfig(name="adamw", learning_rate=1).value("no_weight_decay") is None
    for tensor, decays in flattened(decayed(model_spec(MODEL_PRESETS[name]))).items():
        assert decays == tensor.endswith("kernel"), tensor


def test_patterns_spare_parameters_of_weight_decay():
    names = ("encoder/layers_0/mlp/wo/kernel", "token_embedder/embedding", "decoder/mlp/wo/kernel")
    params = nested({name: jnp.zeros(1) for name in names})
    assert all(named(weight_decay_mask(())(params)).values())
    some = named(weight_decay_mask(("encoder/", "^token"))(params))
    assert [some[name] for name in names] == [False, False, True]


@pytest.mark.parametrize("name", slow_unless({"adafactor"}, sorted(OURS)))
def test_a_model_of_single_layers_needs_no_axes(name):
    spec = model_spec(MODEL_PRESETS["t5_1_1_tiny"])
    params = flattened(init_params(spec, jax.random.key(0)))
    gradients = [{key: np.cos(np.arange(p.size)).reshape(p.shape) for key, p in params.items()}]
    config = OptimizerConfig(name=name, learning_rate=0.01, schedule="constant")
    with_axes, _ = train(config, params, gradients, logical_axes(spec))
    without, _ = train(config, params, gradients)
    assert_equal(with_axes, without)
    assert not any(np.array_equal(without[key], params[key]) for key in params)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "adam"}, "name is 'adam'; it must be one of 'adafactor'"),
        ({"warmup_steps": 0}, "warmup_steps is 0"),
        ({"schedule": "decay_every", "steps_per_decay": 0}, "steps_per_decay is 0"),
        ({"schedule": "cosine_decay", "steps_per_cycle": -1}, "steps_per_cycle is -1"),
        ({"clipping_threshold": 0.5}, "clipping_threshold is 0.5"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; it must be above 0"),
        ({"beta1": 1.0}, "beta1 is 1.0; it must be in [0, 1)"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"weight_decay": 1.0, "no_weight_decay": ("(",)}, "'('; it must be a regular expression"),
        ({"no_weight_decay": ("scale",)}, "unset while weight_decay is 0.0"),
        ({"weight_decay_rate_exponent": 1.0}, "while weight_decay is 0.0"),
        ({"minimum_parameter_scale": 0.1, "multiply_by_parameter_scale": False}, "is False"),
        ({"beta2": 0.9}, "beta2 is 0.9; it must be unset with optimizer 'adafactor'"),
        ({"name": "adamw", "learning_rate": 1.0, "decay_rate": 0.8}, "'adamw', which reads"),
        ({"name": "lion", "learning_rate": 1.0, "epsilon": 1.0}, "'lion', which reads"),
        ({"name": "lion"}, "learning_rate is None; it must be set for 'lion'"),
        ({"steps_per_cycle": 5}, "with schedule 'constant * rsqrt_decay', which"),
        ({"schedule": "linear_cooldown"}, "cooldown_steps is None; it must be set for 'adafactor'"),
        (
            {"schedule": "linear_warmup", "learning_rate": 0.1},
            "learning_rate is 0.1; it must be un",
        ),
        ({"schedule": "constant * rsqrt_deacy"}, "'rsqrt_deacy' is not one; a factor is one of '"),
    ],
)
def test_a_configuration_names_what_it_refuses(fields, says):
    with pytest.raises(ValueError, match="OptimizerConfig.*" + re.escape(says)):
        OptimizerConfig(**fields)
