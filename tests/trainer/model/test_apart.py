"""Arrays computed apart are those of one program, and those of one kind share a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from trainer.model import apart
from trainer.model.apart import Apart


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.setattr(apart, "_PROGRAMS", {})
    return apart._PROGRAMS


def drawn(seed, count=4, scale=1.0):
    keys = [jax.random.fold_in(jax.random.key(seed), number) for number in range(count)]
    kernel = nn.initializers.variance_scaling(scale, "fan_in", "truncated_normal")
    return {"kernels": [kernel(key, (3, 5)) for key in keys], "scale": jnp.ones(7), "step": 0}


def assert_same(ones, others):
    assert jax.tree.structure(ones) == jax.tree.structure(others)
    for one, other in zip(*map(jax.tree.leaves, (ones, others)), strict=True):
        assert (one.dtype, one.weak_type, one.shape) == (other.dtype, other.weak_type, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_values_are_those_of_one_program():
    for seed in (0, 3):
        found = Apart(lambda seed=seed: drawn(seed))
        assert_same(found(), jax.jit(lambda seed=seed: drawn(seed))())
        assert found.shapes["scale"].shape == (7,)


def test_arrays_that_differ_in_their_seeds_share_a_program(programs):
    Apart(lambda: drawn(0))()
    assert len(programs) == 3
    Apart(lambda: drawn(1, count=6))()
    assert len(programs) == 3


def test_arrays_that_differ_otherwise_have_programs_of_their_own(programs):
    both = Apart(lambda: [*drawn(0, 1)["kernels"], *drawn(0, 1, scale=2.0)["kernels"]])()
    assert len(programs) == 2
    assert not np.array_equal(*both)
    apart_by_value = Apart(lambda: [jnp.ones(3), jnp.zeros(3), jnp.ones(3, jnp.int32)])()
    assert [leaf.tolist() for leaf in apart_by_value] == [[1] * 3, [0] * 3, [1] * 3]


def test_arrays_outside_of_the_function_are_inputs():
    key, table = jax.random.key(5), np.arange(6.0).reshape(2, 3)

    def function():
        noise = jax.random.normal(jax.random.fold_in(key, 2), (3,))
        return [noise, jnp.asarray(table) @ noise, jnp.asarray(table)]

    assert_same(Apart(function)(), jax.jit(function)())


def test_what_no_array_needs_is_not_computed():
    def function():
        x = jnp.ones(3)
        jax.debug.callback(lambda: pytest.fail("computed"))
        return x + 1

    assert Apart(function)().tolist() == [2, 2, 2]


def test_each_array_has_its_sharding(programs):
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    shardings = [jax.sharding.NamedSharding(mesh, PartitionSpec(axis)) for axis in ("x", None)]
    size = 2 * jax.device_count()

    def function():
        return [jax.random.normal(jax.random.key(each), (size,)) for each in (1, 2)]

    found = Apart(function)(shardings)
    assert [each.sharding for each in found] == shardings
    assert len(programs) == 2
    assert_same(found, jax.jit(function, out_shardings=shardings)())


def test_the_programs_kept_are_bounded(programs, monkeypatch):
    monkeypatch.setattr(apart, "_MOST_PROGRAMS", 2)
    for length in range(1, 6):
        assert Apart(lambda length=length: jnp.ones(length))().shape == (length,)
        assert len(programs) <= 2
