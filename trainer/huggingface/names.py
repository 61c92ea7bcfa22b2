"""Names of our parameters in transformers, and conversion of parameters in both directions.

Our kernels are [in, out]; torch's weights are [out, in], except GPT-2's. Our tables of relative
positions are [heads, buckets], theirs [buckets, heads]. No other tensors are transposed.

Source: google-research/t5x and transformers' modeling_t5.py, modeling_umt5.py, modeling_bert.py,
modeling_llama.py, modeling_gemma.py and modeling_gpt2.py.
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import traverse_util

from tasks.terminal.command_line import UserError, nearest
from tasks.vocabulary import PAD_ID
from trainer.huggingface import t5_experiments
from trainer.huggingface.kinds import KINDS
from trainer.model.attention import DotProductAttention
from trainer.model.capabilities import TRANSFORMERS
from trainer.model.config import ModelConfig
from trainer.model.parts import FULL_PATTERN, PER_LAYER
from trainer.model.paths import named
from trainer.model.spec import LayerSpec, ModelSpec, model_spec
from trainer.model.transformer import init_params, parameter_facts

Tree = dict[str, Any]
Tensors = dict[str, np.ndarray]

_TRANSPOSED = ("kernel", "rel_embedding")
GPT2 = "transformer."
_PROJECTIONS = ("query", "key", "value")
# Module -> the kernels that it holds as one tensor: GPT-2's, and ModernBERT's two.
_JOINED = {"c_attn": _PROJECTIONS, "Wqkv": _PROJECTIONS, "Wi": ("wi_0", "wi_1")}


def logits_are_tied(config: ModelConfig) -> bool:
    """Returns whether the logits are computed with the token embedding."""
    return model_spec(config).output.tied


def activations(config: ModelConfig) -> tuple[str, ...]:
    """Returns our names for the feed-forward activations; () for other kinds of sublayers."""
    last = [*model_spec(config).stacks.values()][-1]
    return last.layers[0].feed_forward.activations


def _unsupported(config: ModelConfig) -> list[str]:
    known = TRANSFORMERS in config.mixer_facts.exports
    known |= config.part("mixer").name in t5_experiments.MIXERS
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


def decoder_layer(config: ModelConfig) -> LayerSpec:
    """Returns a decoder's first layer."""
    spec = model_spec(config)
    assert isinstance(spec, ModelSpec)
    return spec.decoder.layers[0]


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
    if parts := _unsupported(config):
        raise UserError(f"transformers has no counterpart for {', '.join(parts)}")
    modules = KINDS[kind].tensors(config)
    if not logits_are_tied(config):
        path, module = KINDS[kind].kernel
        modules[path] = module
    memory = {"memory_embedder/embedding": Place(t5_experiments.MEMORY, False)}
    found = {path: _place(path, module) for path, module in modules.items()}
    if numbered := KINDS[kind].numbered:
        found[numbered] = found[numbered]._replace(unused=pad + 1)
    return (memory if config.memory_tokens else {}) | found


def _place(path: str, module: str) -> Place:
    *_, owner, name = path.split("/")
    tensor = name if name.startswith("tap_") else "bias" if name.endswith("bias") else "weight"
    is_gpt2 = module.startswith(GPT2)
    joined = _JOINED.get(module.rpartition(".")[2])
    part = (joined.index(owner), len(joined)) if joined else (0, 1)
    return Place(f"{module}.{tensor}", name in _TRANSPOSED and not is_gpt2, *part)


def to_tensors(params: Tree, config: ModelConfig, kind: str, pad: int = PAD_ID) -> Tensors:
    """Converts the unscanned tree to arrays under transformers' names.

    Leaves out a head that the type lacks. `pad` is the padding id of config.json.
    """
    found, flat = places(config, kind, pad), named(params)
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
    bias = f"{KINDS[kind].kernel[1]}.bias"
    if bias in _COPIES and not logits_are_tied(config):
        # For untied logits, transformers reads the bias stored beside the kernel.
        tensors[bias] = tensors[_COPIES[bias][0]]
    blank = KINDS[kind].blank(config)
    return tensors | {name: np.zeros(shape, np.float32) for name, shape in blank.items()}


# Names of the token embedding; T5's stacks share it, and a folder may have it under any of them.
_T5_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
EMBEDDINGS = (
    *_T5_EMBEDDINGS,
    *("model.embed_tokens.weight", "transformer.wte.weight"),
    *(f"{name}.embeddings.word_embeddings.weight" for name in ("bert", "roberta")),
    *("model.embeddings.tok_embeddings.weight", "model.encoder.embed_tokens.weight"),
)
# The kernel of the logits, which is the embedding again if they are tied.
KERNELS = frozenset(
    {
        *("lm_head.weight", "cls.predictions.decoder.weight"),
        *("lm_head.decoder.weight", "decoder.weight"),
    }
)
# Names that early releases gave to a norm's parameters.
_EARLY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def _renamed(tensors: Mapping[str, np.ndarray], kind: str) -> Tensors:
    """Returns tensors under the names that current releases of transformers write."""
    beginning, found = KINDS[kind].beginning, dict(tensors)
    if beginning and not any(name.startswith(beginning) for name in tensors):
        heads = (*_HEADS, beginning)
        found = {n if n.startswith(heads) else beginning + n: t for n, t in tensors.items()}
    for early, name in _EARLY.items():
        found = {n.replace(early, name) if n.endswith(early) else n: t for n, t in found.items()}
    return found


def _with_embedding(tensors: Tensors, table: str, config: ModelConfig, where: str) -> Tensors:
    """Returns tensors with the token embedding under the name `table` alone.

    Raises a UserError if the folder lacks it, or has tensors with different values for it.
    """
    names = [table]
    if table in _T5_EMBEDDINGS:
        names += [name for name in _T5_EMBEDDINGS if name != table]
    if logits_are_tied(config):
        names += sorted(KERNELS)
    present = [name for name in names if name in tensors]
    if not present:
        known = " or ".join(name for name in names if name not in KERNELS)
        shape = (config.vocab_size, config.emb_dim)
        alike = (n for n, each in tensors.items() if each.shape == shape and n not in KERNELS)
        raise UserError(f"{where} has no token embedding {known}{nearest(table, alike)}")
    first, *others = present
    for name in others:
        if not np.array_equal(tensors[first], tensors[name]):
            cure = ""
            if name in KERNELS:
                cure = (
                    "; if its logits have a kernel of their own, set tie_word_embeddings to false"
                )
            raise UserError(
                f"{where}: {name} and {first} differ, but the model has one table for both{cure}"
            )
    rest = {name: tensor for name, tensor in tensors.items() if name not in present}
    return {table: tensors[first], **rest}


# Beginnings of the names of heads.
_HEADS = ("lm_head.", "cls.", "head.", "decoder.")
# Prefix of tensor names -> description of a folder without such tensors, and a remedy.
_MISSING = {
    "lm_head.dense.": "an encoder alone, as saved by RobertaModel; name a folder saved by "
    "RobertaForMaskedLM",
    "head.dense.": "an encoder alone, as saved by ModernBertModel; name a folder saved by "
    "ModernBertForMaskedLM",
    "decoder.": "an encoder alone, as saved by T5EncoderModel; name a folder saved by "
    "T5ForConditionalGeneration",
    "lm_head.": "a model whose logits use the embedding, but its config.json does not say so; "
    "make it with tie_word_embeddings=False",
}


def _why_missing(name: str, tensors: Mapping[str, np.ndarray]) -> str:
    for beginning, what in _MISSING.items():
        if name.startswith(beginning) and not any(each.startswith(beginning) for each in tensors):
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
    spec, found, flat = model_spec(config), places(config, kind, pad), Tensors()
    tables = [place.tensor for place in found.values() if place.tensor in EMBEDDINGS]
    tensors = _renamed(tensors, kind)
    if tables:
        tensors = _with_embedding(tensors, tables[0], config, where)
    unread = KINDS[kind].unread, tuple(KINDS[kind].blank(config))
    rest = {n: each for n, each in tensors.items() if not n.startswith(unread[0] + unread[1])}
    if t5_experiments.MEMORY_COPY in rest and t5_experiments.MEMORY not in rest:
        rest[t5_experiments.MEMORY] = rest.pop(t5_experiments.MEMORY_COPY)
        tensors = dict(rest)
    facts_of = parameter_facts(spec)
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
    for path, facts in facts_of.items():
        if path in drawn:
            flat[path] = np.asarray(start[path.removeprefix(f"{_DRAWN}/")])
            continue
        place = found[path]
        name = place.tensor
        if name not in tensors:
            raise UserError(f"{where} has no tensor {name}{_why_missing(name, tensors)}")
        rest.pop(name, None)
        array = tensors[name]
        if array.shape[place.outputs] % place.parts == 0:
            array = np.split(array, place.parts, axis=place.outputs)[place.part]
        array = array[place.unused :] if place.unused else array
        array = (array.T if place.transposed else array).astype(np.float32)
        if array.shape != facts.shape:
            raise UserError(
                f"{where}: {name} gives parameter {path} the shape {list(array.shape)}, but "
                f"the model's is {list(facts.shape)}"
            )
        flat[path] = np.ascontiguousarray(array)
    for name, array in rest.items():
        originals = [tensors[each] for each in _COPIES.get(name, ()) if each in tensors]
        copied = any(np.array_equal(array, each) for each in originals)
        if originals and not copied:
            raise UserError(f"{where}: {name} and {_COPIES[name][0]} differ, but the model has one")
        if not copied and not name.endswith(_WITHOUT_EFFECT):
            raise UserError(f"{where} has a tensor {name} that the model has no place for")
    return traverse_util.unflatten_dict(flat, sep="/")


# The head for the order of segments, needed only in pretraining.
_DRAWN = "order_head"


def _is_drawn(path: str) -> bool:
    return path.startswith(f"{_DRAWN}/")


# Tensors that some folders store twice.
_COPIES: Mapping[str, tuple[str, ...]] = {
    t5_experiments.MEMORY_COPY: (t5_experiments.MEMORY,),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
    "lm_head.out_proj.weight": (
        *("model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"),
    ),
    "model.decoder.embed_tokens.weight": ("model.encoder.embed_tokens.weight",),
    "lm_head.decoder.bias": ("lm_head.bias",),
}
# Unused tensors that older releases saved.
_WITHOUT_EFFECT = (
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    "bert.embeddings.position_ids",
    "roberta.embeddings.position_ids",
    *("roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
)


def affine(ours: str, theirs: str, bias: object = True) -> dict[str, str]:
    """Returns the names of a dense layer or a norm, with or without a bias."""
    first = "scale" if ours.endswith("norm") else "kernel"
    return {f"{ours}/{name}": theirs for name in ((first, "bias") if bias else (first,))}


def layers(stack: str, number: int, theirs: str, inside: Mapping[str, str]) -> dict[str, str]:
    """Returns the names in all layers of a stack; `inside` are those of one."""
    return {
        f"{stack}/layers_{index}/{ours}": f"{theirs}.{index}.{name}"
        for index in range(number)
        for ours, name in inside.items()
    }


def t5(config: ModelConfig) -> dict[str, str]:
    modules = {"token_embedder/embedding": "shared"}
    for stack, number, mixers in (
        ("encoder", config.num_encoder_layers, ("attention",)),
        ("decoder", config.num_decoder_layers, ("self_attention", "encoder_decoder_attention")),
    ):
        modules |= affine(f"{stack}/{stack}_norm", f"{stack}.final_layer_norm", False)
        letters = dict(zip(("query", "key", "value", "out"), "qkvo", strict=True))
        if stack == "encoder":
            letters = t5_experiments.encoder_projections(config, letters)
        inside: dict[str, str] = {}
        for place, mixer in enumerate(mixers):
            norm = mixer.replace("encoder_decoder", "cross")
            inside |= affine(f"pre_{norm}_layer_norm", f"{place}.layer_norm", False)
            attention = f"{place}.{'EncDec' if place else 'Self'}Attention"
            for mine, letter in letters.items():
                inside |= affine(f"{mixer}/{mine}", f"{attention}.{letter}", False)
        last = len(mixers)
        inside |= affine("pre_mlp_layer_norm", f"{last}.layer_norm", False)
        for kernel in (*_inner_kernels(config), "wo"):
            inside |= affine(f"mlp/{kernel}", f"{last}.DenseReluDense.{kernel}", False)
        table, bias = "relpos_bias/rel_embedding", "0.SelfAttention.relative_attention_bias"
        if config.position_scheme == PER_LAYER:
            inside[table] = bias
        else:
            modules[f"{stack}/{table}"] = f"{stack}.block.0.layer.{bias}"
        inside = {ours: f"layer.{name}" for ours, name in inside.items()}
        modules |= layers(stack, number, f"{stack}.block", inside)
    return modules


# Placement of norms -> {our norm without its ending: transformers' norm}.
_INPUT, _AFTER = "input_layernorm", "post_attention_layernorm"
_DECODER_NORMS: Mapping[str, Mapping[str, str]] = {
    "pre": {"pre_self_attention": _INPUT, "pre_mlp": _AFTER},
    "branch": {"post_self_attention": _AFTER, "post_mlp": "post_feedforward_layernorm"},
    "sandwich": {
        "pre_self_attention": _INPUT,
        "post_self_attention": _AFTER,
        "pre_mlp": "pre_feedforward_layernorm",
        "post_mlp": "post_feedforward_layernorm",
    },
    "primer_alternating": {"pre_self_attention": _INPUT, "post_mlp": "post_feedforward_layernorm"},
}


def decoder(config: ModelConfig) -> dict[str, str]:
    """Returns the names of LlamaForCausalLM and of models like it, ours included."""
    layer = decoder_layer(config)
    mixer = cast(DotProductAttention, layer.mixer)  # the only kind that can be exported
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    if mixer.shared_query_key:
        attention = {**attention, "query_from_key": "q_from_k"}
        del attention["key"]
    gated = len(_inner_kernels(config)) == 2
    mlp = {"wi_0": "gate_proj", "wi_1": "up_proj"} if gated else {"wi": "up_proj"}
    mlp["wo"] = "down_proj"
    has_bias = layer.norm.has_bias
    inside: dict[str, str] = {}
    for ours, theirs in _DECODER_NORMS[config.value("norm_placement")].items():
        inside |= affine(f"{ours}_layer_norm", theirs, has_bias)
    if mixer.query_key_norm is not None:
        inside |= affine("self_attention/query_norm", "self_attn.q_norm", has_bias)
        inside |= affine("self_attention/key_norm", "self_attn.k_norm", has_bias)
    bias, out_bias = config.value("attention_bias"), config.attention_out_bias
    for mine, name in attention.items():
        ours, theirs = f"self_attention/{mine}", f"self_attn.{name}"
        own = bias if mine != "out" or out_bias is None else out_bias
        inside |= affine(ours, theirs, own)
        if mixer.convolution and name in ("q_proj", "k_proj", "v_proj"):
            for step in range(getattr(mixer.convolution, "width", 0)):
                inside[f"{ours}_convolution/tap_{step}"] = f"self_attn.{name[0]}_conv"
    for mine, name in mlp.items():
        inside |= affine(f"mlp/{mine}", f"mlp.{name}", layer.feed_forward.bias)
    modules = {
        "decoder/token_embedder/embedding": "model.embed_tokens",
        **affine("decoder/decoder_norm", "model.norm", has_bias),
        **layers("decoder", config.num_decoder_layers, "model.layers", inside),
    }
    if config.position_scheme == "relative":
        modules["decoder/relpos_bias/rel_embedding"] = "model.relative_attention_bias"
    return modules


def gpt2(config: ModelConfig) -> dict[str, str]:
    inside = {
        **affine("pre_self_attention_layer_norm", "ln_1"),
        **affine("pre_mlp_layer_norm", "ln_2"),
        **affine("self_attention/out", "attn.c_proj"),
        **affine("mlp/wi", "mlp.c_fc"),
        **affine("mlp/wo", "mlp.c_proj"),
    }
    for name in _PROJECTIONS:
        inside |= affine(f"self_attention/{name}", "attn.c_attn")
    return {
        "decoder/token_embedder/embedding": f"{GPT2}wte",
        "decoder/position_embedder/pos_embedding": f"{GPT2}wpe",
        **affine("decoder/decoder_norm", f"{GPT2}ln_f"),
        **layers("decoder", config.num_decoder_layers, f"{GPT2}h", inside),
    }


def bert(config: ModelConfig) -> dict[str, str]:
    modules = {
        "token_embedder/embedding": "bert.embeddings.word_embeddings",
        "encoder/type_embedder/embedding": "bert.embeddings.token_type_embeddings",
        **affine("encoder/embedding_layer_norm", "bert.embeddings.LayerNorm"),
        **affine("mlm_head/dense", "cls.predictions.transform.dense"),
        **affine("mlm_head/layer_norm", "cls.predictions.transform.LayerNorm"),
        "mlm_head/logits_bias": "cls.predictions",
        **affine("order_head/pooler", "bert.pooler.dense"),
        **affine("order_head/logits", "cls.seq_relationship"),
    }
    if config.position_scheme == "absolute":
        table = "bert.embeddings.position_embeddings"
        modules["encoder/position_embedder/pos_embedding"] = table
    if config.position_scheme == "relative":
        table = "bert.encoder.layer.0.attention.self.relative_attention_bias"
        modules["encoder/relpos_bias/rel_embedding"] = table
    inside = {
        **affine("attention/out", "attention.output.dense"),
        **affine("mlp/wi", "intermediate.dense"),
        **affine("mlp/wo", "output.dense"),
    }
    for name in _PROJECTIONS:
        inside |= affine(f"attention/{name}", f"attention.self.{name}")
    if config.value("norm_placement") == "pre":
        modules |= affine("encoder/encoder_norm", "bert.encoder.last_layer_ln")
        inside |= affine("pre_attention_layer_norm", "pre_attention_ln")
        inside |= affine("pre_mlp_layer_norm", "post_attention_ln")
    else:
        inside |= affine("post_attention_layer_norm", "attention.output.LayerNorm")
        inside |= affine("post_mlp_layer_norm", "output.LayerNorm")
    return modules | layers("encoder", config.num_encoder_layers, "bert.encoder.layer", inside)


def _inner_kernels(config: ModelConfig) -> tuple[str, ...]:
    return ("wi_0", "wi_1") if len(activations(config)) == 2 else ("wi",)
