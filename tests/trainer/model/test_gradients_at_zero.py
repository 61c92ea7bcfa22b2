"""Parts that read zeros have finite gradients; elsewhere, gradients follow the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import slow_unless
from tests.trainer.model.conftest import TinyModel, family_of, tiny_config
from trainer.model import norms, registry
from trainer.model.norms import LayerNorm, RMSNorm
from trainer.model.paths import named

PARTS = [(slot, name) for slot, known in registry.SLOTS.items() for name in known]


def gradients_of(model, batch):
    """Returns a compiled function from parameters to gradients by path."""

    def loss(params):
        output = model.model.apply({"params": params}, batch)
        parts = output if isinstance(output, tuple) else (output,)
        return sum(jnp.mean(jax.nn.logsumexp(part.astype(jnp.float32), -1)) for part in parts)

    gradient = jax.jit(jax.grad(loss))
    return lambda params: named(gradient(params))


@pytest.mark.parametrize(
    ("norm", "changes"),
    slow_unless(
        [("rms_norm", {}), ("rms_norm", {"parallel_blocks": "one_norm"})],
        [
            ("rms_norm", {}),
            ("layer_norm:bias=false", {}),
            ("rms_norm", {"norm_placement": "sandwich"}),
            ("rms_norm", {"norm_placement": "branch"}),
            ("rms_norm", {"parallel_blocks": "two_norms"}),
            ("rms_norm", {"parallel_blocks": "one_norm"}),
        ],
        pytest.mark.processes,
    ),
)
def test_a_row_of_zeros_has_a_sound_gradient_in_many_layers(batch, norm, changes):
    """Rows begin with the padding id, whose row transformers initialises with zeros."""
    changes = {"num_decoder_layers": 12, "scan_layers": True, **changes}
    model = TinyModel("lm", norm=norm, query_key_norm=True, **changes)
    params = jax.tree.map(jnp.copy, model.params)
    table = params["decoder"]["token_embedder"]["embedding"]
    params["decoder"]["token_embedder"]["embedding"] = table.at[0].set(0)
    rows = {name: each for name, each in batch.items() if name.startswith("decoder")}
    rows["decoder_input_tokens"] = rows["decoder_input_tokens"].at[:, 0].set(0)
    found = gradients_of(model, rows)(params)
    assert [path for path, each in found.items() if not jnp.isfinite(each).all()] == []
    assert 0 < jnp.abs(found["decoder/token_embedder/embedding"][0]).max() < 1e4


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()])
def test_norms_have_their_bits_and_gradients_elsewhere(norm, monkeypatch):
    of_formula = same_elsewhere(norm, norms, monkeypatch)
    assert jnp.abs(of_formula).max() > 100 or isinstance(norm, LayerNorm)


def same_elsewhere(norm, module, monkeypatch):
    """Checks bits and gradients where a norm reads no zeros; returns the formula's where it does.

    `module` is the norm's.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)
    x = x.at[0, 0].set(0).at[0, 1].set(0).at[0, 1, 3].set(1e-12)

    def both():
        return jax.jit(jax.value_and_grad(lambda x: (norm.normalised(x) * (x + 1)).sum()))(x)

    found, gradient = both()
    monkeypatch.setattr(module, "inverse_root", lambda m, _, e: jax.lax.rsqrt(m + e))
    wanted, whole = both()
    assert found == wanted
    assert gradient.at[0, 0].set(0).tobytes() == whole.at[0, 0].set(0).tobytes()
    return whole[0, 0]


@pytest.mark.processes
@pytest.mark.parametrize("dtype", slow_unless(["float32"], ["float32", "bfloat16"]))
@pytest.mark.parametrize(("slot", "name"), PARTS)
def test_every_part_has_finite_gradients_at_zero(batch, slot, name, dtype):
    family = family_of(slot, name)
    changes = {"num_heads": 4, "max_positions": 8, "query_key_norm": True, slot: name}
    try:
        model = TinyModel(tiny_config(family, **changes, dtype=dtype))
    except ValueError:  # some have no norms of queries and keys
        model = TinyModel(tiny_config(family, **changes | {"query_key_norm": None}, dtype=dtype))
    gradients = gradients_of(model, batch)
    for params in (model.params, jax.tree.map(jnp.zeros_like, model.params)):
        tables = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key == "embedding" else leaf, params
        )
        found = gradients(tables)
        assert [path for path, each in found.items() if not jnp.isfinite(each).all()] == []
