"""Names of the modules of transformers that hold our parameters, by path.

Source: transformers' modeling_t5.py, modeling_umt5.py, modeling_bert.py and
modeling_llama.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from trainer.model.attention import DotProductAttention
from trainer.model.config import ModelConfig
from trainer.model.registry import PER_LAYER
from trainer.model.spec import LayerSpec, ModelSpec, model_spec

PROJECTIONS = ("query", "key", "value")


def activations(config: ModelConfig) -> tuple[str, ...]:
    """Returns our names for the feed-forward activations; () for other kinds of sublayers."""
    last = [*model_spec(config).stacks.values()][-1]
    return last.layers[0].feed_forward.activations


def decoder_layer(config: ModelConfig) -> LayerSpec:
    """Returns a decoder's first layer."""
    spec = model_spec(config)
    assert isinstance(spec, ModelSpec)
    return spec.decoder.layers[0]


def affine(ours: str, theirs: str, bias: object = True) -> dict[str, str]:
    """Returns the names of a dense layer or a norm, with or without a bias."""
    first = "scale" if ours.endswith("norm") else "kernel"
    return {f"{ours}/{name}": theirs for name in ((first, "bias") if bias else (first,))}


def layers(stack: str, number: int, theirs: str, inside: Mapping[str, str]) -> dict[str, str]:
    """Returns the names in all layers of a stack; `inside` are the names in one."""
    return {
        f"{stack}/layers_{index}/{ours}": f"{theirs}.{index}.{name}"
        for index in range(number)
        for ours, name in inside.items()
    }


# Projections of attention -> their names in T5.
T5_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}


def t5(
    config: ModelConfig, of_encoder: Mapping[str, str] = MappingProxyType(T5_PROJECTIONS)
) -> dict[str, str]:
    """Returns the names of a T5; `of_encoder` are the projections of its encoder's mixer."""
    modules = {"token_embedder/embedding": "shared"}
    for stack, number, mixers in (
        ("encoder", config.num_encoder_layers, ("attention",)),
        ("decoder", config.num_decoder_layers, ("self_attention", "encoder_decoder_attention")),
    ):
        modules |= affine(f"{stack}/{stack}_norm", f"{stack}.final_layer_norm", False)
        letters = T5_PROJECTIONS if stack == "decoder" else of_encoder
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
    inside = {
        **affine("attention/out", "attention.output.dense"),
        **affine("mlp/wi", "intermediate.dense"),
        **affine("mlp/wo", "output.dense"),
    }
    for name in PROJECTIONS:
        inside |= affine(f"attention/{name}", f"attention.self.{name}")
    inside |= affine("post_attention_layer_norm", "attention.output.LayerNorm")
    inside |= affine("post_mlp_layer_norm", "output.LayerNorm")
    return modules | layers("encoder", config.num_encoder_layers, "bert.encoder.layer", inside)


def _inner_kernels(config: ModelConfig) -> tuple[str, ...]:
    return ("wi_0", "wi_1") if len(activations(config)) == 2 else ("wi",)
