"""Reads checkpoints of Mesh TensorFlow, the T5 library before T5X, and of Primer.

A folder holds `model.ckpt-STEP.index` and `model.ckpt-STEP.data-…`. Variables are named after the
scopes of Mesh's layers; layers are unstacked, since Mesh saves variables one by one even if it
stacks them on devices. NAME_slot_vr and the like are Adafactor's slots for a variable NAME.

Source: tensorflow/mesh, `transformer/` and `optimize.AdafactorOptimizer`; T5X,
`checkpoint_importer.py`; Primer, `t5_models.py`.
"""

import re
from collections.abc import Iterable

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.annexes.t5x import tensor_bundle
from trainer.checkpoints import layout
from trainer.checkpoints.stored import NO_STEP, Checkpoint
from trainer.checkpoints.tensors import Tensor

_INDEX = re.compile(r"model\.ckpt-(\d+)\.index")
_STEP = "global_step"
_TOWERS = {"encoder": "encoder", "decoder": "decoder", "transformer": "decoder"}
_TOWER = "(encoder|decoder|transformer)"
_SLOT = re.compile(r"(.+)_slot_(vr|vc|v|m)")
_MOMENTS = {"vr": "v_row", "vc": "v_col", "v": "v", "m": "m"}
# Mesh's other optimizers, whose state is ignored.
_OF_OTHER_OPTIMIZERS = ("/adam_m", "/adam_v", "_momentum_v")
# Names of norms; "layer_norm" is the older name of "rms_norm".
_NORM = (
    r"(?:(?:layer_norm|rms_norm|final_layer_norm)/|"
    r"true_layer_norm/layer_prepostprocess/layer_norm/layer_norm_|"
    r"primer_norm/layer_prepostprocess/primer_norm/primer_norm_)(scale|bias)"
)
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out", "qk": "query"}
_ATTENTION = r"(SelfAttention|MDHA|EncDecAttention)"
_TABLE = "relpos_bias/rel_embedding"


def find(path: str) -> str | None:
    """Returns the prefix of the checkpoint at `path` (with or without ".index"), or None."""
    prefix = path.removesuffix(tensor_bundle.SUFFIX)
    is_one = not path.endswith("/") and files.exists(prefix + tensor_bundle.SUFFIX)
    return prefix if is_one else None


def checkpoints(folder: str) -> dict[int, str]:
    """Returns the prefixes of a folder's checkpoints by ascending step."""
    found = filter(None, map(_INDEX.fullmatch, files.list_names(folder)))
    steps = sorted(int(match[1]) for match in found)
    return {step: files.join(folder, f"model.ckpt-{step}") for step in steps}


def load(prefix: str) -> Checkpoint:
    """Opens a checkpoint and reads names, shapes and dtypes."""
    variables = tensor_bundle.load(prefix)
    stored = variables.pop(_STEP, None)
    names = {name: _SLOT.fullmatch(name) for name in variables}
    parameters: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    unknown = []
    layers = _layers(list(variables))
    for name, slot in names.items():
        if name.endswith(_OF_OTHER_OPTIMIZERS):
            continue
        ours = _ours(slot[1] if slot else name, layers)
        if ours is None:
            unknown.append(name)
        elif slot:
            moments.setdefault(ours, {})[_MOMENTS[slot[2]]] = variables[name]
        else:
            parameters[ours] = variables[name]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{prefix}: no counterpart for the variable {sorted(unknown)[0]}{more}")
    for name, kept in moments.items():
        shape = parameters[name].shape if name in parameters else ()
        if len(shape) == 2 and shape[0] == shape[1] and {"v_row", "v_col"} <= kept.keys():
            # If both axes are equal, Mesh treats the first as the larger, T5X the second.
            kept["v_row"], kept["v_col"] = kept["v_col"], kept["v_row"]
    step = int(stored.whole()) if stored else NO_STEP
    shared = _shared_tables(parameters)
    parameters = {shared.get(name, name): value for name, value in parameters.items()}
    moments = {shared.get(name, name): kept for name, kept in moments.items()}
    parts = layout.unstacked(parameters, moments)
    return Checkpoint(prefix, step, parameters, parts=parts)


def _layers(names: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        if match := re.match(rf"{_TOWER}/block_\d+/layer_(\d+)/", name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _ours(name: str, layers: dict[str, int]) -> str | None:
    if name == "shared/embedding":
        return "token_embedder/embedding"
    top = re.fullmatch(rf"{_TOWER}/(.+)", name)
    if not top:
        return None
    tower, rest = _TOWERS[top[1]], top[2]
    if rest == "embedding":
        return f"{tower}/token_embedder/embedding"
    if rest == "logits/kernel" and tower == "decoder":
        return "decoder/logits_dense/kernel"
    if norm := re.fullmatch(_NORM, rest):
        return f"{tower}/{tower}_norm/{norm[1]}"
    block = re.fullmatch(r"block_(\d+)/layer_(\d+)/(.+)", rest)
    if not block:
        return None
    inside = _in_block(tower, int(block[2]), layers[top[1]], block[3])
    return inside and f"{tower}/layers_{int(block[1])}/{inside}"


def _in_block(tower: str, layer: int, layers: int, name: str) -> str | None:
    """Returns the name of a sublayer's variable within its T5X layer, or None."""
    own = "attention" if tower == "encoder" else "self_attention"
    sublayers = [own, "cross_attention", "mlp"] if layers == 3 else [own, "mlp"]
    if norm := re.fullmatch(_NORM, name):
        return f"pre_{sublayers[layer]}_layer_norm/{norm[1]}" if layer < len(sublayers) else None
    if dense := re.fullmatch(r"DenseReluDense/(wi|wi_0|wi_1|wo)/(kernel|bias)", name):
        return f"mlp/{dense[1]}/{dense[2]}"
    found = re.fullmatch(rf"{_ATTENTION}/(.+)", name)
    if not found:
        return None
    mixer = "encoder_decoder_attention" if found[1] == "EncDecAttention" else own
    if found[2] in ("q", "k", "v", "o"):
        return f"{mixer}/{_PROJECTIONS[found[2]]}/kernel"
    if found[2] == "relative_attention_bias" and mixer == own:
        return _TABLE
    if found[2] == "q_solo_project/kernel":
        return f"{mixer}/query_from_key/kernel"
    if tap := re.fullmatch(r"(q|k|v|qk)_dconv/conv_(\d+)", found[2]):
        return f"{mixer}/{_PROJECTIONS[tap[1]]}_convolution/tap_{tap[2]}"
    return None


def _shared_tables(names: Iterable[str]) -> dict[str, str]:
    """Returns name -> new name for tables that layer 0 holds for its whole stack."""
    own = [name for name in names if name.endswith(_TABLE)]
    stacks = [name.partition("/")[0] for name in own]
    return {
        name: name.replace("layers_0/", "")
        for name, stack in zip(own, stacks, strict=True)
        if "/layers_0/" in name and stacks.count(stack) == 1
    }
