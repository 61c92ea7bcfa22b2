"""Reads and writes transformers' config.json of T5, Llama, BERT and our own type."""

from collections.abc import Mapping
from typing import Any

from tasks.vocabulary import PAD_ID
from trainer.huggingface import module_names, rotary
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import KINDS, Kind
from trainer.huggingface.module_names import activations, decoder_layer
from trainer.huggingface.names import logits_are_tied
from trainer.model import registry
from trainer.model.config import ModelConfig
from trainer.model.part_facts import TRANSFORMERS
from trainer.model.registry import PER_LAYER
from trainer.model.slot import Choice

# The model_type of modeling_palimpsest.py.
CUSTOM = "palimpsest"
# Fixed in our modelling file; a folder with other values holds a different model.
OUR_BUCKETS, OUR_DISTANCE = 32, 128

# Our activations -> transformers' names.
ACTIVATIONS = {
    "gelu": "gelu_new",
    "gelu_erf": "gelu",
    "relu": "relu",
    "silu": "silu",
    "squared_relu": "relu2",
}
T5_PROJECTIONS = {
    ("relu",): "relu",
    ("gelu",): "gelu_new",
    ("gelu_erf",): "gelu",
    ("silu",): "silu",
    ("squared_relu",): "relu2",
    ("gelu", "linear"): "gated-gelu",
    ("silu", "linear"): "gated-silu",
    ("relu", "linear"): "gated-relu",
}


# T5's families.
T5S = ("t5_1_0", "t5_1_1")

# transformers' size fields -> ours.
T5 = {
    "d_model": "emb_dim",
    "d_kv": "head_dim",
    "d_ff": "mlp_dim",
    "num_heads": "num_heads",
    "num_layers": "num_encoder_layers",
}
_LAYERS = {
    "hidden_size": "emb_dim",
    "intermediate_size": "mlp_dim",
    "num_attention_heads": "num_heads",
}
_DECODER = {**_LAYERS, "num_hidden_layers": "num_decoder_layers"}
BERT = {
    **_LAYERS,
    "num_hidden_layers": "num_encoder_layers",
    "max_position_embeddings": "max_positions",
}


def sizes(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns sizes under transformers' names; `names` maps these to ours."""
    return {theirs: getattr(config, ours) for theirs, ours in names.items()}


def norm_of(kind: str, epsilon: float, **others: Any) -> str:
    """Returns the text of a norm."""
    return str(Choice(kind, _NORM_OPTIONS[kind](epsilon=float(epsilon), **others)))


_NORM_OPTIONS = {"rms_norm": registry.NormOptions, "layer_norm": registry.LayerNormOptions}


def relative_of(fields: Fields, name: str = "relative") -> str:
    """Returns T5's distance biases."""
    relative = registry.Relative(
        num_buckets=fields.get("relative_attention_num_buckets", 32),
        max_distance=fields.get("relative_attention_max_distance", 128),
    )
    return str(Choice(name, relative))


def from_t5(fields: Fields, **pieces: Any) -> ModelConfig:
    """Returns a T5, mT5 or umT5, or a model like T5 with `pieces`."""
    kind = fields["model_type"]
    like_t5 = KINDS[kind].like_t5
    standard = "relu" if like_t5 else "gated-gelu"
    projection = fields.named("feed_forward_proj", T5_PROJECTIONS, standard)
    # transformers derives these two fields, but obeys explicit values.
    activation = ACTIVATIONS[projection[0]]
    fields.require("dense_act_fn", activation)
    fields.require("is_gated_act", len(projection) == 2)
    # transformers 5 records all logits as tied, but stores the kernel of untied ones. mT5's logits
    # are never scaled. Without T5's field `scale_decoder_outputs`, tied logits are scaled;
    # transformers 4, which lacks it, ignores a kernel that is stored beside them.
    tied = bool(fields.get("tie_word_embeddings", like_t5))
    of_5 = fields.get("scale_decoder_outputs", None)
    scaled = (tied if of_5 is None else bool(of_5)) and kind != "mt5"
    if not like_t5 or not scaled or of_5 is not None:
        tied = tied and "lm_head.weight" not in fields.tensors
    unscaled, tied_scale = (1.0, None) if tied else (None, fields.size("d_model") ** -0.5)
    return ModelConfig(
        family="t5_1_0" if tied else "t5_1_1",
        **fields.sizes(T5),
        num_decoder_layers=fields.get("num_decoder_layers", fields.size("num_layers")),
        dropout_rate=fields.get("dropout_rate", 0.0),
        tied_logits=tied,
        logits_scale=tied_scale if scaled else unscaled,
        mlp_activations=projection,
        norm=norm_of("rms_norm", fields.get("layer_norm_epsilon", 1e-6)),
        position=relative_of(fields, PER_LAYER if kind == "umt5" else "relative"),
        **pieces,
    )


def from_decoder(
    fields: Fields,
    family: str,
    gated: bool = True,
    activation: str = "silu",
    activation_field: str = "hidden_act",
    **pieces: Any,
) -> ModelConfig:
    """Returns a decoder; `activation` is transformers' default if the field is missing."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    activation = fields.named(activation_field, ACTIVATIONS, activation)
    return ModelConfig(
        family=family,
        **fields.sizes(_DECODER),
        num_kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=fields.size("head_dim", max(1, fields.size("hidden_size") // heads)),
        num_encoder_layers=0,
        mlp_activations=(activation, "linear") if gated else (activation,),
        **pieces,
    )


def from_llama_like(fields: Fields, epsilon: float = 1e-6, **pieces: Any) -> ModelConfig:
    """Returns a Llama with other `pieces`; `epsilon` is transformers' default."""
    return from_decoder(
        fields,
        "llama",
        norm=norm_of("rms_norm", fields.get("rms_norm_eps", epsilon)),
        position=rotary.read(fields),
        tied_logits=fields.get("tie_word_embeddings", False),
        **pieces,
    )


def _from_llama(fields: Fields) -> ModelConfig:
    biases = {name: fields.get(name, False) for name in ("attention_bias", "mlp_bias")}
    return from_llama_like(fields, **biases)


def _from_custom(fields: Fields) -> ModelConfig:
    # Folders written before Primer was added lack these; they are then None, as in ModelConfig.
    names = ("mixer", "norm", "norm_placement", "mlp_bias")
    pieces = {name: fields.get(name, None) for name in names}
    fields.require("num_key_value_heads", fields.size("num_attention_heads"))
    fields.require("rms_norm_eps", 1e-6)
    fields.require("relative_attention_num_buckets", OUR_BUCKETS)
    fields.require("relative_attention_max_distance", OUR_DISTANCE)
    return from_decoder(
        fields,
        str(fields.get("family", "lm")),
        bool(fields.get("gated_mlp", True)),
        tied_logits=fields.get("tie_word_embeddings", False),
        **pieces,
    )


def from_bert(fields: Fields, family: str = "bert", position: str = "absolute") -> ModelConfig:
    """Returns a BERT; the file must say so if positions are absolute."""
    fields.require("type_vocab_size", 2)
    fields.require("is_decoder", False)
    if position == "absolute":
        fields.require("position_embedding_type", position)
    return ModelConfig(
        family=family,
        position=position,
        **fields.sizes(BERT),
        head_dim=fields.size("hidden_size") // fields.size("num_attention_heads"),
        num_decoder_layers=0,
        dropout_rate=fields.get("hidden_dropout_prob", 0.1),
        tied_logits=fields.get("tie_word_embeddings", True),
        mlp_activations=(fields.named("hidden_act", ACTIVATIONS, "gelu"),),
        norm=norm_of("layer_norm", fields.get("layer_norm_eps", 1e-12)),
    )


def epsilon_of(config: ModelConfig) -> float:
    """Returns the norm's epsilon; raises KeyError if it has none."""
    norm = config.part("norm")
    if not hasattr(norm.options, "epsilon"):
        raise KeyError(norm.name)
    return float(norm.options.epsilon)


def to_t5(config: ModelConfig, positions: int) -> dict[str, Any]:
    """Returns the fields of a T5; raises KeyError if positions are not relative."""
    relative = config.part("position").options
    if not isinstance(relative, registry.Relative):
        raise KeyError(config.position)
    tied = logits_are_tied(config)
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        **sizes(config, T5),
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": T5_PROJECTIONS[activations(config)],
        "relative_attention_num_buckets": relative.num_buckets,
        "relative_attention_max_distance": relative.max_distance,
        "layer_norm_epsilon": epsilon_of(config),
        "dropout_rate": config.dropout_rate,
        "decoder_start_token_id": PAD_ID,
        # Without this field, transformers scales tied logits.
        "scale_decoder_outputs": tied and config.logits_scale is None,
    }


def _to_umt5(config: ModelConfig, positions: int) -> dict[str, Any]:
    if logits_are_tied(config) and config.logits_scale is not None:
        raise KeyError("logits_scale")
    written = to_t5(config, positions)
    return {**written, "architectures": ["UMT5ForConditionalGeneration"]}


def _to_decoder(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        **sizes(config, _DECODER),
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_dim,
        "hidden_act": ACTIVATIONS[activations(config)[0]],
        "rms_norm_eps": epsilon_of(config),
        # Rows begin with id 0 in training.
        "bos_token_id": PAD_ID,
    }


def to_rotary_decoder(config: ModelConfig, positions: int, architecture: str) -> dict[str, Any]:
    """Returns the fields that Llama shares with decoders that are like it."""
    return {
        "architectures": [architecture],
        **_to_decoder(config, positions),
        "max_position_embeddings": positions,
        **rotary.for_both_majors(rotary.written(config)),
        "attention_bias": bool(config.value("attention_bias")),
    }


def _to_llama(config: ModelConfig, positions: int) -> dict[str, Any]:
    if config.emb_dim % config.num_heads:
        raise KeyError("num_heads")  # transformers refuses such a Llama
    written = to_rotary_decoder(config, positions, "LlamaForCausalLM")
    return {**written, "mlp_bias": bool(config.value("mlp_bias"))}


def _to_custom(config: ModelConfig, positions: int) -> dict[str, Any]:
    if TRANSFORMERS not in config.mixer_facts.exports:
        raise KeyError(config.mixer)
    if config.value("norm_placement") not in ("pre", "primer_alternating"):
        raise KeyError(config.norm_placement)
    module = f"modeling_{CUSTOM}"
    layer = decoder_layer(config)
    return {
        "architectures": ["PalimpsestForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.PalimpsestConfig",
            "AutoModelForCausalLM": f"{module}.PalimpsestForCausalLM",
        },
        **_to_decoder(config, positions),
        "family": config.family,
        "gated_mlp": len(activations(config)) == 2,
        "mixer": config.part("mixer").name,
        "norm": config.part("norm").name,
        "norm_placement": config.value("norm_placement"),
        "mlp_bias": layer.feed_forward.bias,
        "relative_attention_num_buckets": OUR_BUCKETS,
        "relative_attention_max_distance": OUR_DISTANCE,
    }


def _to_bert(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        # The weights include both heads; BertForMaskedLM would load only one.
        "architectures": ["BertForPreTraining"],
        **sizes(config, BERT),
        "hidden_act": ACTIVATIONS[activations(config)[0]],
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.dropout_rate,
        "type_vocab_size": 2,
        "layer_norm_eps": epsilon_of(config),
    }


DECODERS = frozenset({"is_decoder"})
# Names of T5's token embedding; its stacks share it, and a folder may have it under any of them.
T5_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_T5_ALONE = {
    "decoder.": "an encoder alone, as saved by T5EncoderModel; name a folder saved by "
    "T5ForConditionalGeneration",
}
_T5S = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
_T5 = Kind(
    *(from_t5, to_t5, module_names.t5, T5S),
    inert=frozenset({"is_decoder", "scalable_attention"}),
    compared=_T5S,
    like_t5=True,
    embeddings=T5_EMBEDDINGS,
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    missing=_T5_ALONE,
)
_LLAMA = Kind(
    *(_from_llama, _to_llama, module_names.decoder, ("llama", "lm"), "model."),
    DECODERS,
    compared=("LlamaForCausalLM",),
)
for _name, _kind in {
    CUSTOM: _LLAMA._replace(
        read=_from_custom,
        write=_to_custom,
        families=("lm",),
        inert=DECODERS | {"auto_map"},
        compared=("PalimpsestForCausalLM",),
    ),
    "t5": _T5,
    "mt5": _T5._replace(families=(), like_t5=False),
    "umt5": _T5._replace(write=_to_umt5, like_t5=False, compared=("UMT5ForConditionalGeneration",)),
    "llama": _LLAMA,
    "bert": Kind(
        *(from_bert, _to_bert, module_names.bert, ("bert",), "bert."),
        kernel=("mlm_head/logits_dense/kernel", "cls.predictions.decoder"),
        compared=("BertForPreTraining", "BertForMaskedLM"),
        fills=True,
        embeddings=("bert.embeddings.word_embeddings.weight",),
        heads=("cls.",),
        twice={"cls.predictions.decoder.bias": ("cls.predictions.bias",)},
        unused=("bert.embeddings.position_ids",),
    ),
}.items():
    KINDS.register(_name, _kind)
