"""Names of our parameters in transformers, and conversion of parameters in both directions.

Our kernels are [in, out]; torch's weights are [out, in], except GPT-2's. Our tables of relative
positions are [heads, buckets], theirs [buckets, heads]. No other tensor is transposed. GPT-2 joins
queries, keys and values in one tensor.

Source: google-research/t5x and transformers' modeling_t5.py, modeling_umt5.py, modeling_bert.py,
modeling_llama.py, modeling_gemma.py and modeling_gpt2.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from tasks.terminal.command_line import UserError, nearest
from trainer.huggingface import t5_experiments
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


def logits_are_tied(config: ModelConfig) -> bool:
    """Returns whether the token embedding computes the logits."""
    return model_spec(config).output.tied


def activations(config: ModelConfig) -> tuple[str, ...]:
    """Returns our names of the feed-forward activations; () for other kinds of sublayers."""
    last = [*model_spec(config).stacks.values()][-1]
    return last.layers[0].feed_forward.activations


def _unsupported(config: ModelConfig) -> list[str]:
    """Returns the parts without a counterpart in transformers or our modelling file."""
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
    """A parameter's place: a tensor, or the `part`-th of `parts` equal column blocks of it."""

    tensor: str
    transposed: bool
    part: int = 0
    parts: int = 1


def places(config: ModelConfig, kind: str) -> dict[str, Place]:
    """Returns each parameter's place by path ("encoder/encoder_norm/scale") in the unscanned tree.

    `kind` is the model_type that computes the model. Raises UserError if transformers lacks a part
    of it.
    """
    if parts := _unsupported(config):
        raise UserError(f"transformers has no counterpart for {', '.join(parts)}")
    if kind == "gpt2":
        return _gpt2(config)
    modules = _MODULES[kind](config)
    memory = {"memory_embedder/embedding": Place(t5_experiments.MEMORY, False)}
    return (memory if config.memory_tokens else {}) | {
        path: Place(f"{module}.{_tensor(path)}", path.endswith(_TRANSPOSED))
        for path, module in modules.items()
    }


def _tensor(path: str) -> str:
    """Returns a parameter's name within its torch module."""
    name = path.rsplit("/", 1)[-1]
    return name if name.startswith("tap_") else "bias" if name.endswith("bias") else "weight"


def to_tensors(params: Tree, config: ModelConfig, kind: str) -> Tensors:
    """Converts the unscanned tree to float32 arrays under transformers' names."""
    found, flat = places(config, kind), named(params)
    assert flat.keys() == found.keys(), sorted(flat.keys() ^ found.keys())
    columns: dict[str, dict[int, np.ndarray]] = {}
    for path, array in flat.items():
        place, array = found[path], np.asarray(array)
        columns.setdefault(place.tensor, {})[place.part] = array.T if place.transposed else array
    tensors = {
        name: np.concatenate([parts[part] for part in sorted(parts)], axis=-1)
        if len(parts) > 1
        else parts[0]
        for name, parts in columns.items()
    }
    if kind == "bert" and not logits_are_tied(config):
        # For untied logits, transformers reads the bias stored beside their kernel.
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    return tensors


# Prefix of tensor names -> description of a folder without such tensors, and a remedy.
_MISSING = {
    "decoder.": "an encoder alone, as T5EncoderModel saves it; name a folder of "
    "T5ForConditionalGeneration",
    "lm_head.": "a model whose logits use the embedding, which its config.json does not say; "
    "make it with tie_word_embeddings=False",
}


def _why_missing(name: str, tensors: Mapping[str, np.ndarray]) -> str:
    """Returns the end of a message: what the folder holds, or the nearest name."""
    for beginning, what in _MISSING.items():
        if name.startswith(beginning) and not any(each.startswith(beginning) for each in tensors):
            return f": it is {what}"
    return nearest(name, tensors)


def from_tensors(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, kind: str, where: str
) -> Tree:
    """Returns float32 parameters in the unscanned tree; the inverse of `to_tensors`.

    `kind` is the folder's model_type, and `where` its name in messages. A missing head for the
    order of segments gets the initial values of key 0, with a line on stderr. Raises UserError if
    another tensor is missing, unknown or misshapen.
    """
    spec, found, rest = model_spec(config), places(config, kind), dict(tensors)
    tree: Tree = {}
    if t5_experiments.MEMORY_COPY in rest and t5_experiments.MEMORY not in rest:
        rest[t5_experiments.MEMORY] = rest.pop(t5_experiments.MEMORY_COPY)
        tensors = dict(rest)
    facts_of = parameter_facts(spec)
    drawn = [
        path for path in facts_of if path.startswith(_DRAWN) and found[path].tensor not in rest
    ]
    if drawn:
        missing = ", ".join(sorted({found[path].tensor.rpartition(".")[0] for path in drawn}))
        print(
            f"{where} has no {missing}, as BertForMaskedLM saves it: initial values are drawn",
            file=sys.stderr,
        )
        start = named(jax.jit(lambda key: init_params(spec, key)[_DRAWN])(jax.random.key(0)))
    for path, facts in facts_of.items():
        place = found[path]
        name = place.tensor
        if path in drawn:
            tensors = {**tensors, name: np.asarray(start[path.removeprefix(f"{_DRAWN}/")])}
            place = place._replace(transposed=False)
        if name not in tensors:
            raise UserError(f"{where} has no tensor {name}{_why_missing(name, tensors)}")
        rest.pop(name, None)
        array = tensors[name]
        if array.shape[-1] % place.parts == 0:
            array = np.split(array, place.parts, axis=-1)[place.part]
        array = (array.T if place.transposed else array).astype(np.float32)
        if array.shape != facts.shape:
            raise UserError(
                f"{where}: {name} makes a parameter {path} of {list(array.shape)}, and "
                f"the model has {list(facts.shape)}"
            )
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = np.ascontiguousarray(array)
    for name, array in rest.items():
        copied = any(
            original in tensors and np.array_equal(array, tensors[original])
            for original in _COPIES.get(name, ())
        )
        if not copied and not name.endswith(_WITHOUT_EFFECT):
            raise UserError(f"{where} has a tensor {name} that the model has no place for")
    return tree


# The head for the order of segments, needed only in pretraining.
_DRAWN = "order_head"
# Tensors that some folders store twice.
_COPIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "encoder.embed_tokens.weight": ("shared.weight",),
        "decoder.embed_tokens.weight": ("shared.weight",),
        t5_experiments.MEMORY_COPY: (t5_experiments.MEMORY,),
        "cls.predictions.decoder.bias": ("cls.predictions.bias",),
        "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
        "lm_head.weight": (
            "shared.weight",
            "model.embed_tokens.weight",
            "transformer.wte.weight",
        ),
    }
)
# Unused tensors that older releases saved.
_WITHOUT_EFFECT = (
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    "bert.embeddings.position_ids",
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
)


def _t5(config: ModelConfig) -> dict[str, str]:
    modules = {"token_embedder/embedding": "shared"}
    for stack, layers, mixer in (
        ("encoder", config.num_encoder_layers, "attention"),
        ("decoder", config.num_decoder_layers, "self_attention"),
    ):
        bias = "layer.0.SelfAttention.relative_attention_bias"
        if config.position_scheme != PER_LAYER:
            modules[f"{stack}/relpos_bias/rel_embedding"] = f"{stack}.block.0.{bias}"
        modules[f"{stack}/{stack}_norm/scale"] = f"{stack}.final_layer_norm"
        sublayers = [(mixer, f"pre_{mixer}_layer_norm", "SelfAttention")]
        if stack == "decoder":
            cross = ("encoder_decoder_attention", "pre_cross_attention_layer_norm")
            sublayers.append((*cross, "EncDecAttention"))
        for index in range(layers):
            ours, theirs = f"{stack}/layers_{index}", f"{stack}.block.{index}.layer"
            if config.position_scheme == PER_LAYER:
                modules[f"{ours}/relpos_bias/rel_embedding"] = f"{stack}.block.{index}.{bias}"
            for place, (name, norm, attention) in enumerate(sublayers):
                modules[f"{ours}/{norm}/scale"] = f"{theirs}.{place}.layer_norm"
                letters = dict(zip(("query", "key", "value", "out"), "qkvo", strict=True))
                if stack == "encoder":
                    letters = t5_experiments.encoder_projections(config, letters)
                for mine, letter in letters.items():
                    modules[f"{ours}/{name}/{mine}/kernel"] = (
                        f"{theirs}.{place}.{attention}.{letter}"
                    )
            last = f"{theirs}.{len(sublayers)}"
            modules[f"{ours}/pre_mlp_layer_norm/scale"] = f"{last}.layer_norm"
            for kernel in (*_inner_kernels(config), "wo"):
                modules[f"{ours}/mlp/{kernel}/kernel"] = f"{last}.DenseReluDense.{kernel}"
    if not logits_are_tied(config):
        modules["decoder/logits_dense/kernel"] = "lm_head"
    return modules


def _kernel_and_bias(has_bias: object) -> tuple[str, ...]:
    return ("kernel", "bias") if has_bias else ("kernel",)


def _decoder(config: ModelConfig) -> dict[str, str]:
    """Returns names of LlamaForCausalLM, shared by Gemma and our modelling file."""
    layer = decoder_layer(config)
    mixer = cast(DotProductAttention, layer.mixer)  # the only one that can be exported

    def norm(ours: str, theirs: str) -> dict[str, str]:
        return {f"{ours}/{name}": theirs for name in ("scale", "bias")[: 1 + layer.norm.has_bias]}

    modules = {
        "decoder/token_embedder/embedding": "model.embed_tokens",
        **norm("decoder/decoder_norm", "model.norm"),
    }
    second = ("pre_mlp_layer_norm", "post_attention_layernorm")
    if layer.placements.feed_forward is not None:
        second = ("post_mlp_layer_norm", "post_feedforward_layernorm")
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    if mixer.shared_query_key:
        attention = {**attention, "query_from_key": "q_from_k"}
        del attention["key"]
    gated = len(_inner_kernels(config)) == 2
    mlp = {"wi_0": "gate_proj", "wi_1": "up_proj"} if gated else {"wi": "up_proj"}
    mlp["wo"] = "down_proj"
    for index in range(config.num_decoder_layers):
        ours, theirs = f"decoder/layers_{index}", f"model.layers.{index}"
        modules |= norm(f"{ours}/pre_self_attention_layer_norm", f"{theirs}.input_layernorm")
        modules |= norm(f"{ours}/{second[0]}", f"{theirs}.{second[1]}")
        for mine, name in attention.items():
            for part in _kernel_and_bias(config.value("attention_bias")):
                modules[f"{ours}/self_attention/{mine}/{part}"] = f"{theirs}.self_attn.{name}"
            if mixer.convolution and name in ("q_proj", "k_proj", "v_proj"):
                for step in range(getattr(mixer.convolution, "width", 0)):
                    tap = f"{ours}/self_attention/{mine}_convolution/tap_{step}"
                    modules[tap] = f"{theirs}.self_attn.{name[0]}_conv"
        for mine, name in mlp.items():
            for part in _kernel_and_bias(layer.feed_forward.bias):
                modules[f"{ours}/mlp/{mine}/{part}"] = f"{theirs}.mlp.{name}"
    if config.position_scheme == "relative":
        modules["decoder/relpos_bias/rel_embedding"] = "model.relative_attention_bias"
    if not logits_are_tied(config):
        modules["decoder/logits_dense/kernel"] = "lm_head"
    return modules


def _gpt2(config: ModelConfig) -> dict[str, Place]:
    found = {
        "decoder/token_embedder/embedding": Place("transformer.wte.weight", False),
        "decoder/position_embedder/pos_embedding": Place("transformer.wpe.weight", False),
    }

    def norm(ours: str, theirs: str) -> None:
        found[f"{ours}/scale"] = Place(f"{theirs}.weight", False)
        found[f"{ours}/bias"] = Place(f"{theirs}.bias", False)

    def dense(ours: str, theirs: str, part: int = 0, parts: int = 1) -> None:
        found[f"{ours}/kernel"] = Place(f"{theirs}.weight", False, part, parts)
        found[f"{ours}/bias"] = Place(f"{theirs}.bias", False, part, parts)

    for index in range(config.num_decoder_layers):
        ours, theirs = f"decoder/layers_{index}", f"transformer.h.{index}"
        norm(f"{ours}/pre_self_attention_layer_norm", f"{theirs}.ln_1")
        norm(f"{ours}/pre_mlp_layer_norm", f"{theirs}.ln_2")
        for part, name in enumerate(("query", "key", "value")):
            dense(f"{ours}/self_attention/{name}", f"{theirs}.attn.c_attn", part, 3)
        dense(f"{ours}/self_attention/out", f"{theirs}.attn.c_proj")
        dense(f"{ours}/mlp/wi", f"{theirs}.mlp.c_fc")
        dense(f"{ours}/mlp/wo", f"{theirs}.mlp.c_proj")
    norm("decoder/decoder_norm", "transformer.ln_f")
    if not logits_are_tied(config):
        found["decoder/logits_dense/kernel"] = Place("lm_head.weight", True)
    return found


def _bert(config: ModelConfig) -> dict[str, str]:
    def both(ours: str, theirs: str, first: str) -> dict[str, str]:
        return {f"{ours}/{first}": theirs, f"{ours}/bias": theirs}

    modules = {
        "token_embedder/embedding": "bert.embeddings.word_embeddings",
        "encoder/type_embedder/embedding": "bert.embeddings.token_type_embeddings",
        **both("encoder/embedding_layer_norm", "bert.embeddings.LayerNorm", "scale"),
        **both("mlm_head/dense", "cls.predictions.transform.dense", "kernel"),
        **both("mlm_head/layer_norm", "cls.predictions.transform.LayerNorm", "scale"),
        "mlm_head/logits_bias": "cls.predictions",
        **both("order_head/pooler", "bert.pooler.dense", "kernel"),
        **both("order_head/logits", "cls.seq_relationship", "kernel"),
    }
    if config.position_scheme == "absolute":
        table = "bert.embeddings.position_embeddings"
        modules["encoder/position_embedder/pos_embedding"] = table
    if config.position_scheme == "relative":
        table = "bert.encoder.layer.0.attention.self.relative_attention_bias"
        modules["encoder/relpos_bias/rel_embedding"] = table
    pre = config.value("norm_placement") == "pre"
    if pre:
        modules |= both("encoder/encoder_norm", "bert.encoder.last_layer_ln", "scale")
    for index in range(config.num_encoder_layers):
        ours, theirs = f"encoder/layers_{index}", f"bert.encoder.layer.{index}"
        for name in ("query", "key", "value"):
            modules |= both(f"{ours}/attention/{name}", f"{theirs}.attention.self.{name}", "kernel")
        output = f"{theirs}.attention.output"
        modules |= both(f"{ours}/attention/out", f"{output}.dense", "kernel")
        modules |= both(f"{ours}/mlp/wi", f"{theirs}.intermediate.dense", "kernel")
        modules |= both(f"{ours}/mlp/wo", f"{theirs}.output.dense", "kernel")
        norms = {
            "post_attention_layer_norm": f"{output}.LayerNorm",
            "post_mlp_layer_norm": f"{theirs}.output.LayerNorm",
        }
        if pre:
            norms = {
                "pre_attention_layer_norm": f"{theirs}.pre_attention_ln",
                "pre_mlp_layer_norm": f"{theirs}.post_attention_ln",
            }
        for mine, norm in norms.items():
            modules |= both(f"{ours}/{mine}", norm, "scale")
    if not logits_are_tied(config):
        modules["mlm_head/logits_dense/kernel"] = "cls.predictions.decoder"
    return modules


def _inner_kernels(config: ModelConfig) -> tuple[str, ...]:
    return ("wi_0", "wi_1") if len(activations(config)) == 2 else ("wi",)


_MODULES: Mapping[str, Callable[[ModelConfig], dict[str, str]]] = MappingProxyType(
    {
        **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
        **dict.fromkeys(("llama", "gemma", "palimpsest"), _decoder),
        "bert": _bert,
    }
)
