"""GPT-2 in transformers.

Source: transformers' modeling_gpt2.py.
"""

from typing import Any

from tasks.vocabulary import PAD_ID
from trainer.huggingface.config_json_fields import Fields
from trainer.huggingface.formats import ACTIVATIONS, DECODERS, epsilon_of, norm_of, sizes
from trainer.huggingface.kinds import Kind
from trainer.huggingface.module_names import PROJECTIONS, activations, affine, layers
from trainer.model.config import ModelConfig

_MODEL = "transformer."
_GPT2 = {
    "n_embd": "emb_dim",
    "n_layer": "num_decoder_layers",
    "n_head": "num_heads",
    "n_positions": "max_positions",
}


def _read(fields: Fields) -> ModelConfig:
    for name, expected in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
    ):
        fields.require(name, expected)
    width = fields.size("n_embd")
    return ModelConfig(
        family="gpt2",
        **fields.sizes(_GPT2),
        head_dim=width // fields.size("n_head"),
        mlp_dim=fields.get("n_inner", 4 * width),
        num_encoder_layers=0,
        dropout_rate=fields.get("resid_pdrop", 0.1),
        tied_logits=fields.get("tie_word_embeddings", True),
        mlp_activations=(fields.named("activation_function", ACTIVATIONS, "gelu_new"),),
        norm=norm_of("layer_norm", fields.get("layer_norm_epsilon", 1e-5)),
    )


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        **sizes(config, _GPT2),
        "n_inner": config.mlp_dim,
        "activation_function": ACTIVATIONS[activations(config)[0]],
        "layer_norm_epsilon": epsilon_of(config),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout_rate),
        # Rows begin with id 0 in training.
        "bos_token_id": PAD_ID,
    }


def _tensors(config: ModelConfig) -> dict[str, str]:
    inside = {
        **affine("pre_self_attention_layer_norm", "ln_1"),
        **affine("pre_mlp_layer_norm", "ln_2"),
        **affine("self_attention/out", "attn.c_proj"),
        **affine("mlp/wi", "mlp.c_fc"),
        **affine("mlp/wo", "mlp.c_proj"),
    }
    for name in PROJECTIONS:
        inside |= affine(f"self_attention/{name}", "attn.c_attn")
    return {
        "decoder/token_embedder/embedding": f"{_MODEL}wte",
        "decoder/position_embedder/pos_embedding": f"{_MODEL}wpe",
        **affine("decoder/decoder_norm", f"{_MODEL}ln_f"),
        **layers("decoder", config.num_decoder_layers, f"{_MODEL}h", inside),
    }


GPT2 = Kind(
    *(_read, _write, _tensors, ("gpt2", "llama", "lm", "primer"), _MODEL),
    DECODERS,
    compared=("GPT2LMHeadModel",),
    fills=True,
    transposed=False,
    joined={"c_attn": PROJECTIONS},
    embeddings=("transformer.wte.weight",),
    unused=(".attn.bias", ".attn.masked_bias"),
)
