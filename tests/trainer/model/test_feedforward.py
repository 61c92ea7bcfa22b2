"""Gradients of feed-forward sublayers on devices that store the projections' gradients."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.parameters import slow_unless
from tests.support.trees import assert_close
from trainer.model import feedforward
from trainer.model.dense import Shared
from trainer.model.device import Device
from trainer.model.feedforward import ACTIVATIONS, Mlp
from trainer.model.parametrisation import StandardParametrisation

KINDS = ("cpu", "TPU v6 lite")


def both_ways(monkeypatch, loss, arguments):
    """Returns the loss and gradients without and with stored gradients of the projections."""
    results = []
    for kind in KINDS:
        monkeypatch.setattr(feedforward, "tracing_device", lambda kind=kind: Device(kind))
        # A new function each time: JAX would otherwise reuse the other device's trace.
        traced = jax.jit(lambda arguments: jax.value_and_grad(loss)(arguments)).trace(arguments)
        assert ("optimization_barrier" in str(traced.jaxpr)) == Device(kind).activates_once
        results.append(traced.lower().compile()(arguments))
    return results


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("projections", [1, 2])
def test_stored_gradients_are_equal(monkeypatch, activation, projections):
    shared = Shared(8, 8, "float32", 0.3, StandardParametrisation())
    layer = Mlp(16, (activation, "linear")[:projections]).build(shared)
    x, out = jax.random.normal(jax.random.key(0), (2, 2, 3, 8))
    params = layer.init(jax.random.key(1), x, None, True)

    def loss(inputs):
        rngs = {"dropout": jax.random.key(2)}
        return jnp.sum(layer.apply(*inputs, None, False, rngs=rngs) * out)

    plain, stored = both_ways(monkeypatch, loss, (params, x))
    assert_close(stored, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    slow_unless(
        [{"remat": "dots", "scan_layers": True}],
        [{"remat": "full"}, {"remat": "dots", "scan_layers": True}, {"scan_layers": True}],
        pytest.mark.processes,
    ),
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_they_are_in_rematerialised_and_scanned_layers(monkeypatch, make_tiny, batch, changes):
    tiny = make_tiny("t5_1_1", dropout_rate=0.3, num_encoder_layers=2, **changes)

    def loss(params):
        rngs = {"dropout": jax.random.key(2)}
        logits = tiny.model.apply({"params": params}, batch, deterministic=False, rngs=rngs)
        return jnp.mean(jnp.square(logits))

    plain, stored = both_ways(monkeypatch, loss, tiny.params)
    assert_close(stored, plain, rtol=1e-4, atol=1e-6)
