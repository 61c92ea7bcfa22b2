"""RoBERTa: BERT without token types, and with positions numbered from the padding id.

The table of positions begins with rows for the padding id and the ids below it, which no token
gets: they are not read, and are written as zeros.

Source: transformers 5.23, modeling_roberta.py; RoBERTa (arXiv:1907.11692).
"""

from typing import Any

from trainer.huggingface import formats, module_names
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.kinds import Kind
from trainer.huggingface.module_names import activations
from trainer.model.config import ModelConfig

_POSITIONS = "encoder/position_embedder/pos_embedding"
_HEAD = {
    "cls.predictions": "lm_head",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
}
# The activation of its head, whatever hidden_act is.
_ACTIVATION = "gelu_erf"


def _read(fields: Fields) -> ModelConfig:
    for name, expected in (
        ("is_decoder", False),
        ("position_embedding_type", "absolute"),
        ("hidden_act", formats.ACTIVATIONS[_ACTIVATION]),
    ):
        fields.require(name, expected)
    sizes = fields.sizes(formats.BERT)
    sizes["max_positions"] -= fields["pad_token_id"] + 1
    return ModelConfig(
        family="bert",
        **sizes,
        head_dim=fields.size("hidden_size") // fields.size("num_attention_heads"),
        num_decoder_layers=0,
        dropout_rate=fields.get("hidden_dropout_prob", 0.1),
        tied_logits=fields.get("tie_word_embeddings", True),
        token_types=fields.get("type_vocab_size", 2),
        norm=formats.norm_of("layer_norm", fields.get("layer_norm_eps", 1e-12)),
    )


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    if not config.token_types or config.emb_dim % config.num_heads:
        raise KeyError("token_types, num_heads")  # transformers cannot run such a model
    if config.position_scheme != "absolute":
        raise KeyError(config.position)
    return {
        "architectures": ["RobertaForMaskedLM"],
        **formats.sizes(config, formats.BERT),
        "hidden_act": formats.ACTIVATIONS[activations(config)[0]],
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.dropout_rate,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": formats.epsilon_of(config),
    }


def _tensors(config: ModelConfig) -> dict[str, str]:
    return {
        path: _HEAD.get(name, name.replace("bert.", "roberta.", 1))
        for path, name in module_names.bert(config).items()
        if not path.startswith("order_head/")
    }


ROBERTA = Kind(
    *(_read, _write, _tensors, ("bert",), "roberta."),
    kernel=("mlm_head/logits_dense/kernel", "lm_head.decoder"),
    numbered=_POSITIONS,
    compared=("RobertaForMaskedLM",),
    embeddings=("roberta.embeddings.word_embeddings.weight",),
    twice={"lm_head.decoder.bias": ("lm_head.bias",)},
    unused=(
        *("roberta.embeddings.position_ids", "roberta.pooler.dense.weight"),
        "roberta.pooler.dense.bias",
    ),
    missing={
        "lm_head.dense.": "an encoder alone, as saved by RobertaModel; name a folder saved by "
        "RobertaForMaskedLM"
    },
)
