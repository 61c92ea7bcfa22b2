"""Names of our parameters in transformers, and conversion of parameters in both directions.

Our kernels are [in, out]; torch's weights are [out, in], except GPT-2's. Our tables of relative
positions are [heads, buckets], theirs [buckets, heads]. No other tensors are transposed.

Source: google-research/t5x and transformers' modeling_t5.py.
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tasks.terminal.command_line import UserError, nearest
from tasks.vocabulary import PAD_ID
from trainer.huggingface.kinds import KINDS, Kind
from trainer.model.config import ModelConfig
from trainer.model.part_facts import TRANSFORMERS
from trainer.model.paths import named, tree_of
from trainer.model.registry import FULL_PATTERN
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params, parameter_facts

Tree = dict[str, Any]
Tensors = dict[str, np.ndarray]

_TRANSPOSED = ("kernel", "rel_embedding")


def logits_are_tied(config: ModelConfig) -> bool:
    """Returns whether the logits are computed with the token embedding."""
    return model_spec(config).output.tied


def _unsupported(config: ModelConfig, kind: Kind) -> list[str]:
    known = TRANSFORMERS in config.mixer_facts.exports or config.part("mixer").name in kind.mixers
    parts = [] if known else [f"mixer {config.mixer}"]
    if config.part("attention_pattern").name != FULL_PATTERN:
        parts.append(f"attention_pattern {config.attention_pattern}")
    for stack in model_spec(config).stacks.values():
        for layer in stack.layers:
            parts += [
                type(part).__name__
                for part in (layer.norm, layer.feed_forward)
                if TRANSFORMERS not in part.exports
            ]
    return list(dict.fromkeys(parts))


class Place(NamedTuple):
    """A parameter's place: a tensor, or the `part`-th of its `parts` equal blocks of outputs.

    The tensor begins with `unused` other rows.
    """

    tensor: str
    transposed: bool
    part: int = 0
    parts: int = 1
    unused: int = 0

    @property
    def outputs(self) -> int:
        """The tensor's axis of outputs."""
        return 0 if self.transposed else -1


def places(config: ModelConfig, kind: str, pad: int = PAD_ID) -> dict[str, Place]:
    """Returns path in the unscanned tree ("encoder/encoder_norm/scale") -> the parameter's place.

    `kind` is the model_type, `pad` the padding id of config.json. Raises UserError if transformers
    lacks a part of the model.
    """
    row = KINDS[kind]
    if parts := _unsupported(config, row):
        raise UserError(f"transformers has no counterpart for {', '.join(parts)}")
    modules = row.tensors(config)
    if not logits_are_tied(config):
        path, module = row.kernel
        modules[path] = module
    found = {path: _place(path, module, row) for path, module in modules.items()}
    if row.numbered:
        found[row.numbered] = found[row.numbered]._replace(unused=pad + 1)
    bare = {path: Place(tensor, False) for path, tensor in row.bare.items()}
    return {**bare, **found} if config.lengthening else found


def _place(path: str, module: str, kind: Kind) -> Place:
    *_, owner, name = path.split("/")
    tensor = name if name.startswith("tap_") else "bias" if name.endswith("bias") else "weight"
    joined = kind.joined.get(module.rpartition(".")[2])
    part = (joined.index(owner), len(joined)) if joined else (0, 1)
    return Place(f"{module}.{tensor}", name in _TRANSPOSED and kind.transposed, *part)


def to_tensors(params: Tree, config: ModelConfig, kind: str, pad: int = PAD_ID) -> Tensors:
    """Converts the unscanned tree to arrays under transformers' names.

    Leaves out a head that the type lacks. `pad` is the padding id of config.json.
    """
    found, flat = places(config, kind, pad), by_expert(named(params))
    flat = {path: array for path, array in flat.items() if path in found or not _is_drawn(path)}
    assert flat.keys() == found.keys(), sorted(flat.keys() ^ found.keys())
    columns: dict[str, dict[int, np.ndarray]] = {}
    axes: dict[str, int] = {}
    for path, array in flat.items():
        place, array = found[path], np.asarray(array)
        axes[place.tensor] = place.outputs
        if place.unused:
            array = np.pad(array, ((place.unused, 0), (0, 0)))
        columns.setdefault(place.tensor, {})[place.part] = array.T if place.transposed else array
    tensors = {
        name: np.concatenate([parts[part] for part in sorted(parts)], axis=axes[name])
        if len(parts) > 1
        else parts[0]
        for name, parts in columns.items()
    }
    row = KINDS[kind]
    bias = f"{row.kernel[1]}.bias"
    if bias in row.twice and not logits_are_tied(config):
        # For untied logits, transformers reads the bias stored beside the kernel.
        tensors[bias] = tensors[row.twice[bias][0]]
    if not logits_are_tied(config):
        tables = (tensors[name] for name in row.embeddings if name in tensors)
        tensors |= dict.fromkeys(row.copies, next(tables, np.empty(0)))
    blank = row.blank(config)
    return tensors | {name: np.zeros(shape, np.float32) for name, shape in blank.items()}


# Names that early releases gave to a norm's parameters.
_EARLY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def _renamed(tensors: Mapping[str, np.ndarray], kind: str) -> Tensors:
    """Returns tensors under the names that current releases of transformers write."""
    beginning, found = KINDS[kind].beginning, dict(tensors)
    if beginning and not any(name.startswith(beginning) for name in tensors):
        heads = (*KINDS[kind].heads, beginning)
        found = {n if n.startswith(heads) else beginning + n: t for n, t in tensors.items()}
    for early, name in _EARLY.items():
        found = {n.replace(early, name) if n.endswith(early) else n: t for n, t in found.items()}
    return found


def _with_embedding(
    tensors: Tensors, table: str, config: ModelConfig, kind: Kind, where: str
) -> Tensors:
    """Returns tensors with the token embedding under the name `table` alone.

    Raises a UserError if the folder lacks it, or has tensors with different values for it.
    """
    kernels, names = kind.kernels, [table]
    names += [name for name in kind.embeddings if name != table]
    if logits_are_tied(config):
        names += sorted(kernels)
    present = [name for name in names if name in tensors]
    if not present:
        known = " or ".join(name for name in names if name not in kernels)
        shape = (config.vocab_size, config.emb_dim)
        alike = (n for n, each in tensors.items() if each.shape == shape and n not in kernels)
        raise UserError(f"{where} has no token embedding {known}{nearest(table, alike)}")
    first, *others = present
    for name in others:
        if not np.array_equal(tensors[first], tensors[name]):
            cure = ""
            if name in kernels:
                cure = (
                    "; if its logits have a kernel of their own, set tie_word_embeddings to false"
                )
            raise UserError(
                f"{where}: {name} and {first} differ, but the model has one table for both{cure}"
            )
    rest = {name: tensor for name, tensor in tensors.items() if name not in present}
    return {table: tensors[first], **rest}


# Prefix of tensor names -> description of a folder without such tensors, and a remedy.
_MISSING = {
    "lm_head.": "a model whose logits use the embedding, but its config.json does not say so; "
    "make it with tie_word_embeddings=False",
}


def _why_missing(name: str, tensors: Mapping[str, np.ndarray], kind: Kind) -> str:
    for beginning, what in {**kind.missing, **_MISSING}.items():
        if name.startswith(beginning) and not any(
            tensor.startswith(beginning) for tensor in tensors
        ):
            return f": it is {what}"
    return nearest(name, tensors)


def from_tensors(
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
    kind: str,
    where: str,
    pad: int = PAD_ID,
) -> Tree:
    """Returns float32 parameters in the unscanned tree; the inverse of `to_tensors`.

    If the head for the order of segments is missing, it gets initial values drawn with key 0, and
    stderr says so. `pad` is the padding id of config.json. Raises UserError if any other tensor is
    missing, unknown or misshapen.
    """
    spec, found, flat, row = model_spec(config), places(config, kind, pad), Tensors(), KINDS[kind]
    tables = [place.tensor for place in found.values() if place.tensor in row.embeddings]
    tensors = _renamed(tensors, kind)
    if tables:
        tensors = _with_embedding(tensors, tables[0], config, row, where)
    unread = row.unread, tuple(row.blank(config))
    rest = {n: each for n, each in tensors.items() if not n.startswith(unread[0] + unread[1])}
    bare = {copy: of[0] for copy, of in row.twice.items() if of[0] in row.bare.values()}
    for copy, original in bare.items():
        if copy in rest and original not in rest:
            rest[original] = rest.pop(copy)
            tensors = dict(rest)
    facts_of = parameter_facts(spec)
    # Broadcast numbers take no memory.
    shapes = {path: np.broadcast_to(0, facts.shape) for path, facts in facts_of.items()}
    drawn = [
        each
        for each in facts_of
        if _is_drawn(each) and (each not in found or found[each].tensor not in rest)
    ]
    if drawn:
        lost = sorted({found[path].tensor.rpartition(".")[0] for path in drawn if path in found})
        missing = ", as saved by BertForMaskedLM, has no " + ", ".join(lost)
        if not lost:
            missing = " has no head for the order of segments"
        print(f"{where}{missing}: initial values are drawn", file=sys.stderr)
        start = named(jax.jit(lambda key: init_params(spec, key)[_DRAWN])(jax.random.key(0)))
    for path, shape in ((path, each.shape) for path, each in by_expert(shapes).items()):
        if path in drawn:
            flat[path] = np.asarray(start[path.removeprefix(f"{_DRAWN}/")])
            continue
        place = found[path]
        name = place.tensor
        if name not in tensors:
            raise UserError(f"{where} has no tensor {name}{_why_missing(name, tensors, row)}")
        rest.pop(name, None)
        array = tensors[name]
        if array.shape[place.outputs] % place.parts == 0:
            array = np.split(array, place.parts, axis=place.outputs)[place.part]
        array = array[place.unused :] if place.unused else array
        array = (array.T if place.transposed else array).astype(np.float32)
        if array.shape != shape:
            raise UserError(
                f"{where}: {name} gives parameter {path} the shape {list(array.shape)}, but "
                f"the model's is {list(shape)}"
            )
        flat[path] = np.ascontiguousarray(array)
    for name, array in rest.items():
        originals = [tensors[each] for each in row.twice.get(name, ()) if each in tensors]
        copied = any(np.array_equal(array, each) for each in originals)
        if originals and not copied:
            raise UserError(
                f"{where}: {name} and {row.twice[name][0]} differ, but the model has one"
            )
        if not copied and not name.endswith(_WITHOUT_EFFECT + row.unused):
            raise UserError(f"{where} has a tensor {name} that the model has no place for")
    for path, facts in facts_of.items():
        if path not in flat:
            each = (flat.pop(_of_expert(path, number)) for number in range(facts.shape[0]))
            flat[path] = np.stack([*each])
    return tree_of(flat)


def _of_expert(path: str, number: int) -> str:
    return path.replace("/experts/", f"/experts/{number}/")


def by_expert(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays by path; one of all experts, "experts/wi", as "experts/0/wi" and so on."""
    return {
        _of_expert(path, number): each
        for path, array in flat.items()
        for number, each in enumerate(array if "/experts/" in path else [array])
    }


# The head for the order of segments, needed only in pretraining.
_DRAWN = "order_head"


def _is_drawn(path: str) -> bool:
    return path.startswith(f"{_DRAWN}/")


# Unused tensors that older releases saved.
_WITHOUT_EFFECT = (".rotary_emb.inv_freq",)
