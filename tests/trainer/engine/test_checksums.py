"""Checksums of arrays: the same on devices and on the host, and changed by every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.engine import checksums, each_array

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool"]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_and_host_agree(dtype, on_host, monkeypatch):
    monkeypatch.setattr(each_array, "_is_on_host", lambda array: on_host)
    for shape in ((), (0, 3), (7,), (3, 4, 5)):
        array = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 50, dtype)
        (found,) = checksums.of_state({"a": array}).values()
        assert found == checksums.of_array(np.asarray(array))
        assert checksums.kind(found) == checksums.kind_of(array)
        if len(shape) > 1:
            rows = [np.asarray(row)[None] for row in array]
            assert found == checksums.of_parts(array.dtype, shape, rows)


def test_typed_keys_count_as_their_data():
    key = jax.random.key(3)
    found = checksums.of_state({"key": key})["key"]
    assert found == checksums.of_array(np.asarray(jax.random.key_data(key)))
    assert checksums.kind(found) == checksums.kind_of(key)


def test_every_bit_and_every_order_counts():
    array = np.random.default_rng(1).integers(0, 256, 96).astype(np.uint8).view(np.float32)
    seen = {checksums.of_array(array)}
    for bit in range(8 * 96):
        flipped = array.view(np.uint8).copy()
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(checksums.of_array(flipped.view(np.float32)))
    assert len(seen) == 1 + 8 * 96
    seen |= {checksums.of_array(other) for other in (array[::-1], np.roll(array, 1), array * 0)}
    seen |= {checksums.of_array(array.reshape(4, 6)), checksums.of_array(array.view(np.int32))}
    assert len(seen) == 1 + 8 * 96 + 5


def test_sharding_does_not_count():
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("x",))
    array = jnp.arange(16.0 * len(devices)).reshape(len(devices), 16)
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert checksums.of_state([array]) == checksums.of_state([jax.device_put(array, along)])
