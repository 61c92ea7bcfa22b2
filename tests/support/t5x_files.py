"""Writes tiny checkpoints in T5X's formats, without T5X and without the trainer's writer.

Names, shapes and metadata are those of checkpoints that T5X at commit cc342d419ec3 wrote for
`t5_1_1/tiny.gin` (examples/t5, each layer apart) and for the same sizes in `examples/scalable_t5`
(layers stacked along axis 1, separate axes for heads and channels, a table of relative positions in
every layer), with its Orbax and its legacy checkpointer. The trees are filled with random numbers
and written by TensorStore and msgpack:

- "orbax", current T5X: `state/_METADATA`, and all arrays as zarr (zstd) in one OCDBT store;
- "placeholder", Orbax of 2022 and 2023: a msgpack tree of "PLACEHOLDER://NAME", zarr folders;
- "legacy", T5X before Orbax: a msgpack tree with `version` and `optimizer`; arrays that T5X does
  not partition (v_row, v_col, m, the step) are inline, others are TensorStore specs of zarr (gzip)
  folders;
- "released", like "legacy" but written to a bucket, as the public T5 1.1 and mT5 checkpoints were:
  the specs name a dummy bucket, as T5X's `_get_spec` does.
"""

import json

import numpy as np
import tensorstore
from flax import serialization, traverse_util

BEFORE_ORBAX = ("legacy", "released")
LAYOUTS = ("orbax", "placeholder", *BEFORE_ORBAX)
D, HEADS, KV, F, V, LAYERS, BUCKETS = 8, 4, 3, 16, 128, 2, 32
STEP = 10

_ATTENTION = {"encoder": ("attention",), "decoder": ("self_attention", "encoder_decoder_attention")}
_NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": (
        "pre_self_attention_layer_norm",
        "pre_cross_attention_layer_norm",
        "pre_mlp_layer_norm",
    ),
}
_KERNEL = {
    **{part: (D, HEADS * KV) for part in ("query", "key", "value")},
    "out": (HEADS * KV, D),
    **{part: (D, F) for part in ("wi_0", "wi_1")},
    "wo": (F, D),
}


def shapes():
    found = {"token_embedder/embedding": (V, D), "decoder/logits_dense/kernel": (D, V)}
    for stack in ("encoder", "decoder"):
        found[f"{stack}/{stack}_norm/scale"] = (D,)
        found[f"{stack}/relpos_bias/rel_embedding"] = (HEADS, BUCKETS)
        for layer in range(LAYERS):
            inside = f"{stack}/layers_{layer}"
            found |= {f"{inside}/{norm}/scale": (D,) for norm in _NORMS[stack]}
            for part, shape in _KERNEL.items():
                places = ("mlp",) if part.startswith("w") else _ATTENTION[stack]
                found |= {f"{inside}/{place}/{part}/kernel": shape for place in places}
    return found


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype("f4") for name, shape in shapes().items()}


def moments(arrays, factored_from, seed=1):
    """Returns T5X's Adafactor state; axes of `factored_from` elements or more are factored."""
    rng = np.random.default_rng(seed)
    unused, found = np.zeros(1, "f4"), {}
    for name, array in arrays.items():
        state = dict.fromkeys(("m", "v", "v_row", "v_col"), unused)
        if array.ndim == 2 and min(array.shape) >= factored_from:
            second, largest = np.argsort(array.shape, kind="stable")
            for kind, gone in (("v_row", largest), ("v_col", second)):
                state[kind] = rng.random(np.delete(array.shape, gone)).astype("f4")
        else:
            state["v"] = rng.random(array.shape).astype("f4")
        found |= {f"{name}/{kind}": value for kind, value in state.items()}
    return found


def scanned(arrays):
    """Returns the parameters in the layout of `scalable_t5`."""
    found = {name: array for name, array in arrays.items() if "layers_" not in name}
    for stack in ("encoder", "decoder"):
        table = found.pop(f"{stack}/relpos_bias/rel_embedding")
        found[f"{stack}/{stack}/relpos_bias/rel_embedding"] = np.stack([table] * LAYERS, 1)
        for name in arrays:
            before, first, rest = name.partition(f"{stack}/layers_0/")
            if before or not first:
                continue
            layers = [arrays[f"{stack}/layers_{layer}/{rest}"] for layer in range(LAYERS)]
            joined = np.stack(layers, 1)
            part = rest.split("/")[-2]
            if part in ("query", "key", "value"):
                joined = joined.reshape(D, LAYERS, HEADS, KV)
            elif part == "out":
                joined = np.stack([layer.reshape(HEADS, KV, D) for layer in layers], 1)
            found[f"{stack}/{stack}/{rest}"] = joined
    return found


def scanned_moments(arrays, seed=1, own_tables=False):
    """Returns Adafactor's state of `scanned(…)`: every kernel is factored by its "embed" axis.

    The state of the tables of positions is the same in all layers, unless `own_tables`.
    """
    rng = np.random.default_rng(seed)
    unused, found = np.zeros(1, "f4"), {}
    for name, array in arrays.items():
        state = dict.fromkeys(("m", "v", "v_row", "v_col"), unused)
        if array.ndim > 2 and name.endswith("kernel"):
            last = name.split("/")[-2] in ("out", "wo")
            sizes = array.shape
            row, rest = (sizes[1:2] + sizes[-1:], sizes[:-1]) if last else (sizes[:2], sizes[1:])
            state |= {"v_row": rng.random(row).astype("f4"), "v_col": rng.random(rest).astype("f4")}
        else:
            value = rng.random(array.shape).astype("f4")
            # Layers with the same table have the same state.
            if "relpos_bias" in name and not own_tables:
                value = np.stack([value[:, 0]] * LAYERS, 1)
            state["v"] = value
        found |= {f"{name}/{kind}": value for kind, value in state.items()}
    return found


def write(folder, layout, parameters, moments=None, step=STEP, dtype="float32"):
    """Writes `folder/checkpoint_STEP` with parameters in `dtype`, and returns its path.

    With `step` None the state has no step.
    """
    path = folder / f"checkpoint_{STEP if step is None else abs(step)}"
    tree = {} if step is None else {"state/step": np.asarray(step, np.int32)}
    tree |= {f"state/param_states/{name}": array for name, array in (moments or {}).items()}
    tree |= {f"target/{name}": array for name, array in parameters.items()}
    inside = path if layout in BEFORE_ORBAX else path / "state"
    inside.mkdir(parents=True)
    leaves = {}
    for name, array in tree.items():
        dotted = name.replace("/", ".")
        kind = dtype if name.startswith("target/") else str(array.dtype)
        if layout in BEFORE_ORBAX and (
            array.ndim == 0 or name.split("/")[-1] in ("m", "v_row", "v_col")
        ):
            leaves[name] = array
            continue
        place = {"driver": "file", "path": f"{inside}/{dotted}/"}
        compressor = {"id": "gzip", "level": 1}
        if layout == "orbax":
            base = {"driver": "file", "path": f"{inside}/"}
            place = {"driver": "ocdbt", "base": base, "path": f"{dotted}/"}
            compressor = {"id": "zstd", "level": 1}
        metadata = {"shape": array.shape, "chunks": array.shape, "compressor": compressor}
        spec = {"driver": "zarr", "kvstore": place, "dtype": kind, "metadata": metadata}
        store = tensorstore.open(
            {**spec, "store_data_equal_to_fill_value": True}, create=True
        ).result()
        store.write(array.astype(store.dtype.numpy_dtype)).result()
        leaves[name] = f"PLACEHOLDER://{dotted}"
        if layout in BEFORE_ORBAX:
            metadata = {**metadata, "shape": list(array.shape), "chunks": list(array.shape)}
            relative = {"driver": "file", "path": f"{dotted}/"}
            if layout == "released":
                relative |= {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
            leaves[name] = {
                "driver": "zarr",
                "dtype": kind,
                "kvstore": relative,
                "metadata": metadata,
            }
    if layout == "orbax":
        _write_metadata(inside, tree)
        return path
    nested = traverse_util.unflatten_dict(leaves, sep="/")
    if layout in BEFORE_ORBAX:
        nested = {"version": 3, "optimizer": nested}
    (inside / "checkpoint").write_bytes(serialization.msgpack_serialize(nested))
    return path


def _write_metadata(folder, tree):
    entries = {}
    for name, array in tree.items():
        keys = tuple(name.split("/"))
        entries[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(array.shape),
            },
        }
    metadata = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / "_METADATA").write_text(json.dumps(metadata))
