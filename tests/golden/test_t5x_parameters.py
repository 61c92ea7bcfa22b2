"""Parameters have T5X's paths, shapes and logical axes; the reference folder is not empty."""

import ast

import jax
import pytest

from trainer.model.spec import model_spec
from trainer.model.transformer import init_params, logical_axes


def paths(tree) -> dict[str, object]:
    """Leaves by "decoder/layers_0/mlp/wo/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}


def test_the_reference_folder_holds_arrays(reference):
    assert (reference.folder / "model_meta.json").is_file()
    assert any(reference.folder.glob("*.npz"))


def test_paths_and_shapes(array_set):
    spec = model_spec(array_set.config)
    ours = jax.eval_shape(lambda key: init_params(spec, key), jax.random.PRNGKey(0))
    expected = {name: array.shape for name, array in paths(array_set.params).items()}
    assert {name: leaf.shape for name, leaf in paths(ours).items()} == expected
    assert all(leaf.dtype == "float32" for leaf in paths(ours).values())


def test_logical_axes(array_set):
    if array_set.name not in array_set.meta.get("axes", {}):
        pytest.skip(f"model_meta.json tells no axes of {array_set.name}")
    told = array_set.meta["axes"][array_set.name]
    expected = {name.removesuffix("_axes"): ast.literal_eval(axes) for name, axes in told.items()}
    ours = logical_axes(model_spec(array_set.config))
    assert {name: tuple(axes) for name, axes in paths(ours).items()} == expected
