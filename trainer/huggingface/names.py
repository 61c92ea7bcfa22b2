"""What our parameters are called in transformers, and the two trees made of one another.

A kernel of ours is [in, out], a weight of torch's [out, in]; our table of relative positions is
[heads, buckets], theirs [buckets, heads]. Nothing else is turned.

Source: google-research/t5x and transformers' modeling_t5.py, modeling_bert.py, modeling_llama.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from tasks.terminal.command_line import UserError, nearest
from trainer.model.config import ModelConfig
from trainer.model.embedding import TiedLogits, TransformedLogits
from trainer.model.feedforward import Mlp
from trainer.model.mixers import DotProductAttention
from trainer.model.norms import LayerNorm, PrimerNorm
from trainer.model.spec import EncoderSpec, LayerSpec, ModelSpec, model_spec

Tree = dict[str, Any]
Tensors = dict[str, np.ndarray]

_TURNED = ("kernel", "rel_embedding")


def logits_are_tied(config: ModelConfig) -> bool:
    """Whether logits are read off the token embedding."""
    spec = model_spec(config)
    logits = spec.logits if isinstance(spec, EncoderSpec) else spec.decoder.logits
    if isinstance(logits, TransformedLogits):
        logits = logits.logits
    return isinstance(logits, TiedLogits)


def activations(config: ModelConfig) -> tuple[str, ...]:
    """Those of the feed-forward layers, by our names; none if they are of another kind."""
    spec = model_spec(config)
    stack = spec.encoder if isinstance(spec, EncoderSpec) else spec.decoder
    feed_forward = stack.layers[0].feed_forward
    return feed_forward.activations if isinstance(feed_forward, Mlp) else ()


def decoder_layer(config: ModelConfig) -> LayerSpec:
    """The first layer of a decoder."""
    spec = model_spec(config)
    assert isinstance(spec, ModelSpec)
    return spec.decoder.layers[0]


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Path of a parameter in the unscanned tree, "encoder/encoder_norm/scale", to its tensor.

    Only of families that `configs.refusal` lets through.
    """
    modules = _MODULES[config.family](config)
    return {path: f"{module}.{_tensor(path)}" for path, module in modules.items()}


def _tensor(path: str) -> str:
    """What a module of torch calls the parameter."""
    name = path.rsplit("/", 1)[-1]
    return name if name.startswith("tap_") else "bias" if name.endswith("bias") else "weight"


def to_tensors(params: Tree, config: ModelConfig) -> Tensors:
    """Arrays float32 under transformers' names, from parameters in the unscanned tree."""
    names, flat = tensor_names(config), _flat(params)
    assert flat.keys() == names.keys(), sorted(flat.keys() ^ names.keys())
    tensors = {names[path]: _turned(path, np.asarray(array)) for path, array in flat.items()}
    if config.family == "bert" and not logits_are_tied(config):
        # Of a kernel of its own, transformers reads the bias beside it.
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    return tensors


def from_tensors(tensors: Mapping[str, np.ndarray], config: ModelConfig, where: str) -> Tree:
    """The inverse: parameters float32 in the unscanned tree.

    Args:
      tensors: of a model of `config`.
      where: what error messages call them.

    Raises:
      UserError: a tensor is missing, too many, or of another shape; names it.
    """
    from trainer.engine.cost import parameter_shapes

    names, rest = tensor_names(config), dict(tensors)
    tree: Tree = {}
    for path, shape in parameter_shapes(config).items():
        name = names["/".join(path)]
        if name not in rest:
            raise UserError(f"{where} has no tensor {name}{nearest(name, tensors)}")
        array = _turned(path[-1], rest.pop(name).astype(np.float32))
        if array.shape != shape:
            raise UserError(
                f"{where}: {name} makes a parameter {'/'.join(path)} of {list(array.shape)}, and "
                f"the model has {list(shape)}"
            )
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = np.ascontiguousarray(array)
    for name, array in rest.items():
        copied = any(
            original in tensors and np.array_equal(array, tensors[original])
            for original in _COPIES.get(name, ())
        )
        if not copied and name not in _WITHOUT_EFFECT:
            raise UserError(f"{where} has a tensor {name} that the model has no place for")
    return tree


def _turned(path: str, array: np.ndarray) -> np.ndarray:
    return array.T if path.endswith(_TURNED) else array


def _flat(tree: Tree, path: str = "") -> Tensors:
    flat: Tensors = {}
    for name, node in tree.items():
        inner = f"{path}/{name}" if path else name
        flat |= _flat(node, inner) if isinstance(node, dict) else {inner: node}
    return flat


# Tensors that some folders have twice.
_COPIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "encoder.embed_tokens.weight": ("shared.weight",),
        "decoder.embed_tokens.weight": ("shared.weight",),
        "cls.predictions.decoder.bias": ("cls.predictions.bias",),
        "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
        "lm_head.weight": ("shared.weight", "model.embed_tokens.weight"),
    }
)
# What older releases saved though nothing reads it.
_WITHOUT_EFFECT = (
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    "bert.embeddings.position_ids",
)


def _t5(config: ModelConfig) -> dict[str, str]:
    modules = {"token_embedder/embedding": "shared"}
    for stack, layers, mixer in (
        ("encoder", config.num_encoder_layers, "attention"),
        ("decoder", config.num_decoder_layers, "self_attention"),
    ):
        block = f"{stack}.block.0.layer.0.SelfAttention"
        modules[f"{stack}/relpos_bias/rel_embedding"] = f"{block}.relative_attention_bias"
        modules[f"{stack}/{stack}_norm/scale"] = f"{stack}.final_layer_norm"
        sublayers = [(mixer, f"pre_{mixer}_layer_norm", "SelfAttention")]
        if stack == "decoder":
            cross = ("encoder_decoder_attention", "pre_cross_attention_layer_norm")
            sublayers.append((*cross, "EncDecAttention"))
        for index in range(layers):
            ours, theirs = f"{stack}/layers_{index}", f"{stack}.block.{index}.layer"
            for place, (name, norm, attention) in enumerate(sublayers):
                modules[f"{ours}/{norm}/scale"] = f"{theirs}.{place}.layer_norm"
                for mine, letter in zip(("query", "key", "value", "out"), "qkvo", strict=True):
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


def _decoder(config: ModelConfig) -> dict[str, str]:
    """LlamaForCausalLM's names, which our own modelling file has too."""
    layer = decoder_layer(config)
    mixer, feed_forward = layer.mixer, layer.feed_forward
    assert isinstance(mixer, DotProductAttention)
    assert isinstance(feed_forward, Mlp)
    with_bias = isinstance(layer.norm, LayerNorm | PrimerNorm)

    def norm(ours: str, theirs: str) -> dict[str, str]:
        return {f"{ours}/{name}": theirs for name in ("scale", "bias")[: 1 + with_bias]}

    modules = {
        "decoder/token_embedder/embedding": "model.embed_tokens",
        **norm("decoder/decoder_norm", "model.norm"),
    }
    second = ("pre_mlp_layer_norm", "post_attention_layernorm")
    if layer.feed_forward_norm_placement is not None:
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
            modules[f"{ours}/self_attention/{mine}/kernel"] = f"{theirs}.self_attn.{name}"
            if mixer.convolution and name in ("q_proj", "k_proj", "v_proj"):
                for step in range(mixer.convolution.width):
                    tap = f"{ours}/self_attention/{mine}_convolution/tap_{step}"
                    modules[tap] = f"{theirs}.self_attn.{name[0]}_conv"
        for mine, name in mlp.items():
            for part in ("kernel", "bias")[: 1 + bool(feed_forward.bias)]:
                modules[f"{ours}/mlp/{mine}/{part}"] = f"{theirs}.mlp.{name}"
    if config.family != "llama":
        modules["decoder/relpos_bias/rel_embedding"] = "model.relative_attention_bias"
    if not logits_are_tied(config):
        modules["decoder/logits_dense/kernel"] = "lm_head"
    return modules


def _bert(config: ModelConfig) -> dict[str, str]:
    def both(ours: str, theirs: str, first: str) -> dict[str, str]:
        return {f"{ours}/{first}": theirs, f"{ours}/bias": theirs}

    modules = {
        "token_embedder/embedding": "bert.embeddings.word_embeddings",
        "encoder/position_embedder/pos_embedding": "bert.embeddings.position_embeddings",
        "encoder/type_embedder/embedding": "bert.embeddings.token_type_embeddings",
        **both("encoder/embedding_layer_norm", "bert.embeddings.LayerNorm", "scale"),
        **both("mlm_head/dense", "cls.predictions.transform.dense", "kernel"),
        **both("mlm_head/layer_norm", "cls.predictions.transform.LayerNorm", "scale"),
        "mlm_head/logits_bias": "cls.predictions",
        **both("order_head/pooler", "bert.pooler.dense", "kernel"),
        **both("order_head/logits", "cls.seq_relationship", "kernel"),
    }
    for index in range(config.num_encoder_layers):
        ours, theirs = f"encoder/layers_{index}", f"bert.encoder.layer.{index}"
        for name in ("query", "key", "value"):
            modules |= both(f"{ours}/attention/{name}", f"{theirs}.attention.self.{name}", "kernel")
        output = f"{theirs}.attention.output"
        modules |= both(f"{ours}/attention/out", f"{output}.dense", "kernel")
        modules |= both(f"{ours}/post_attention_layer_norm", f"{output}.LayerNorm", "scale")
        modules |= both(f"{ours}/mlp/wi", f"{theirs}.intermediate.dense", "kernel")
        modules |= both(f"{ours}/mlp/wo", f"{theirs}.output.dense", "kernel")
        modules |= both(f"{ours}/post_mlp_layer_norm", f"{theirs}.output.LayerNorm", "scale")
    if not logits_are_tied(config):
        modules["mlm_head/logits_dense/kernel"] = "cls.predictions.decoder"
    return modules


def _inner_kernels(config: ModelConfig) -> tuple[str, ...]:
    return ("wi_0", "wi_1") if len(activations(config)) == 2 else ("wi",)


_MODULES: Mapping[str, Callable[[ModelConfig], dict[str, str]]] = MappingProxyType(
    {
        "t5_1_0": _t5,
        "t5_1_1": _t5,
        "lm": _decoder,
        "llama": _decoder,
        "primer": _decoder,
        "bert": _bert,
    }
)
