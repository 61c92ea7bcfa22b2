"""T5Gemma: encoder and decoder with the layers of Gemma 2, each with its own embedding.

Source: transformers 5.23, modeling_t5gemma.py; T5Gemma (arXiv:2504.06225).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainer.annexes.gemma import transformers as gemma
from trainer.annexes.layer_types import layer_types
from trainer.huggingface import module_names
from trainer.huggingface.config_json_fields import Fields, unset
from trainer.huggingface.kinds import Kind
from trainer.model.config import ModelConfig, encoder_sizes
from trainer.model.config_checks import SIZES
from trainer.model.windows import Sliding

_STACKS = ("encoder", "decoder")
# Fields of a stack that another field decides.
_INERT = frozenset(
    {"classifier_dropout_rate", "cross_attention_hidden_size", "tie_word_embeddings"}
)


def read_stacks(
    fields: Fields,
    written: Mapping[str, Mapping[str, Any]],
    read: Callable[[Fields], ModelConfig],
    **pieces: Any,
) -> tuple[ModelConfig, Sliding | None]:
    """Returns the model without windows, and the decoder's windows.

    `written` are the fields of encoder and decoder, which `read` reads as a decoder's. Raises
    ValueError if the stacks differ in more than their number of layers.
    """
    sides = {}
    for stack, fields_of_stack in written.items():
        present = {name: value for name, value in fields_of_stack.items() if not unset(value)}
        nulls = fields_of_stack.keys() - present.keys()
        known = Fields(present, f"{fields.where}: {stack}", (), nulls)
        sides[stack] = read(known)
        known.refuse_unknown(gemma.GEMMA2.inert | _INERT)
    encoder, decoder = sides.values()
    differ = [
        name
        for name in (*_SAME, "attention_window")
        if name != "logits_softcap" and getattr(encoder, name) != getattr(decoder, name)
    ]
    if differ:
        raise ValueError(
            f"encoder and decoder differ in {', '.join(differ)}: our stacks differ in sizes alone"
        )
    fields.require("vocab_size", decoder.vocab_size)
    model = ModelConfig(
        family="t5gemma",
        **{name: getattr(decoder, name) for name in (*_SAME, *SIZES, "num_decoder_layers")},
        encoder_sizes=encoder_sizes(encoder, decoder),
        num_encoder_layers=encoder.num_decoder_layers,
        dropout_rate=fields.get("dropout_rate", 0.0),
        tied_logits=fields.get("tie_word_embeddings", True),
        **pieces,
    )
    return model, layer_types.window_of(decoder)


def _read(fields: Fields) -> ModelConfig:
    written = {stack: fields.section(stack) for stack in _STACKS}
    model, window = read_stacks(fields, written, gemma.read_2, shared_embedding=False)
    if window is None:
        return model
    return replace(model, attention_window=layer_types.text(window, reach=window.window))


# What a decoder of Gemma says of both stacks.
_SAME = (
    *("vocab_size", "mlp_activations", "norm", "position", "attention_bias"),
    *("attention_scale", "attention_softcap", "logits_softcap", "query_key_norm"),
)


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    models = config.of_encoder, replace(config, encoder_sizes=())
    sides = [gemma.write_2(model, positions) for model in models]
    for side in sides:
        del side["architectures"]
    window = layer_types.window_of(config)
    if config.family != "t5gemma" or config.shared_embedding:
        raise KeyError(config.family)
    if window and window.reach != window.window:
        raise KeyError("attention_window")  # an encoder of T5Gemma sees as many on either side
    counts = config.num_encoder_layers, config.num_decoder_layers
    return {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "is_encoder_decoder": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 0,
        "dropout_rate": config.dropout_rate,
        **{
            stack: {
                **side,
                **{"vocab_size": config.vocab_size, "bos_token_id": 0},
                # transformers 4 reads it here.
                "tie_word_embeddings": config.value("tied_logits"),
                "num_hidden_layers": count,
                "layer_types": layer_types.written(config, count),
                "is_decoder": stack == "decoder",
            }
            for stack, side, count in zip(_STACKS, sides, counts, strict=True)
        },
    }


def _tensors(config: ModelConfig) -> dict[str, str]:
    own = {"self_attention": "self_attn", "encoder_decoder_attention": "cross_attn"}
    modules = stacks(config, {stack: f"model.{stack}" for stack in _STACKS}, own)
    for stack in _STACKS:
        modules[f"{stack}/token_embedder/embedding"] = f"model.{stack}.embed_tokens"
    return modules


def stacks(
    config: ModelConfig, places: Mapping[str, str], mixers_of_decoder: Mapping[str, str]
) -> dict[str, str]:
    """Returns the names in both stacks, which are at `places`, without their embeddings."""
    modules: dict[str, str] = {}
    bias = config.value("attention_bias")
    projections = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    counts = config.num_encoder_layers, config.num_decoder_layers
    mixers_of = {"attention": "self_attn"}, mixers_of_decoder
    for stack, count, mixers in zip(_STACKS, counts, mixers_of, strict=True):
        inside: dict[str, str] = {}
        for mixer, theirs in mixers.items():
            norm = mixer.replace("encoder_decoder", "cross")
            for place in ("pre", "post"):
                name = f"{place}_{theirs}_layernorm"
                inside |= module_names.affine(f"{place}_{norm}_layer_norm", name, False)
            for ours, projection in projections.items():
                inside |= module_names.affine(f"{mixer}/{ours}", f"{theirs}.{projection}", bias)
            if config.query_key_norm:
                for letter, ours in (("q", "query"), ("k", "key")):
                    inside |= module_names.affine(
                        f"{mixer}/{ours}_norm", f"{theirs}.{letter}_norm", False
                    )
        for place in ("pre", "post"):
            name = f"{place}_feedforward_layernorm"
            inside |= module_names.affine(f"{place}_mlp_layer_norm", name, False)
        for ours, name in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
            inside |= module_names.affine(f"mlp/{ours}", f"mlp.{name}", False)
        modules |= module_names.affine(f"{stack}/{stack}_norm", f"{places[stack]}.norm", False)
        modules |= module_names.layers(stack, count, f"{places[stack]}.layers", inside)
    return modules


T5GEMMA = Kind(
    *(_read, _write, _tensors, ("t5gemma",), "model."),
    inert=gemma.GEMMA2.inert | {"classifier_dropout_rate"},
    kernel=("decoder/logits_dense/kernel", "lm_head.out_proj"),
    start="bos_token_id",
    compared=("T5GemmaForConditionalGeneration",),
    embeddings=("model.encoder.embed_tokens.weight",),
    twice={
        "lm_head.out_proj.weight": (
            *("model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"),
        ),
        "model.decoder.embed_tokens.weight": ("model.encoder.embed_tokens.weight",),
    },
)
