"""The text models of T5Gemma 2: encoder and decoder with the layers of Gemma 3, one embedding.

Attention of the decoder to the encoder is merged into self-attention. The tower for images is not
read; a folder that we write has one without layers, because transformers' class always has one.

Source: transformers 5.23, modeling_t5gemma2.py; T5Gemma 2 (arXiv:2512.14856), section 2.
"""

from dataclasses import replace
from typing import Any

from trainer.annexes.gemma import transformers as gemma
from trainer.annexes.gemma import transformers_t5gemma as t5gemma
from trainer.annexes.layer_types import layer_types
from trainer.huggingface.config_json_fields import Fields
from trainer.model.config import ModelConfig

_TOWER, _PROJECTOR = "model.encoder.vision_tower.", "model.encoder.multi_modal_projector."
_PLACES = {"encoder": "model.encoder", "decoder": "model.decoder"}
# A tower for images of one pixel, without layers.
_SMALLEST = {
    "model_type": "siglip_vision_model",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), 1),
    **dict.fromkeys(("image_size", "patch_size"), 1),
    "num_hidden_layers": 0,
    "vision_use_head": False,
}


def _read(fields: Fields) -> ModelConfig:
    encoder = Fields(fields.section("encoder"), f"{fields.where}: encoder", ())
    written = {"encoder": encoder.section("text_config"), "decoder": fields.section("decoder")}
    tied = fields.get("tie_word_embeddings", True)
    pieces = {"cross_attention": "merged", "shared_embedding": tied}
    model, window = t5gemma.read_stacks(fields, written, gemma.read_3, **pieces)
    if window is None:
        return model
    # The encoder's queries see `window` keys; if these are even, one more ahead than behind.
    sees = {"reach": (window.window - 1) // 2}
    sees |= {} if window.window % 2 else {"ahead": window.window // 2}
    return replace(model, attention_window=layer_types.text(window, **sees))


def _write(config: ModelConfig, positions: int) -> dict[str, Any]:
    written = gemma.write_3(config, positions)
    del written["architectures"]
    if config.cross_attention != "merged":
        raise KeyError("cross_attention")
    beyond = config.vocab_size  # no id of a text
    side = {**written, "vocab_size": config.vocab_size, "bos_token_id": 0}
    sides = [
        {**side, "num_hidden_layers": count, "layer_types": layer_types.written(config, count)}
        for count in (config.num_encoder_layers, config.num_decoder_layers)
    ]
    return {
        "architectures": ["T5Gemma2ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 0,
        "dropout_rate": config.dropout_rate,
        "image_token_index": beyond,
        "eoi_token_index": beyond,
        "encoder": {
            "text_config": sides[0],
            "vision_config": _SMALLEST,
            "mm_tokens_per_image": 1,
            **dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index"), beyond),
        },
        "decoder": sides[1],
    }


def _tensors(config: ModelConfig) -> dict[str, str]:
    modules = t5gemma.stacks(config, _PLACES, {"self_attention": "self_attn"})
    if config.shared_embedding:
        modules["token_embedder/embedding"] = f"{_PLACES['encoder']}.embed_tokens"
    else:
        for stack, place in _PLACES.items():
            modules[f"{stack}/token_embedder/embedding"] = f"{place}.embed_tokens"
    return modules


def _blank(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, images = config.emb_dim, f"{_TOWER}embeddings."
    tables = [*_PLACES.values()][: 1 if config.shared_embedding else None]
    return {
        **{f"{place}.embed_tokens.eoi_embedding": (width,) for place in tables},
        f"{images}patch_embedding.weight": (1, 3, 1, 1),
        f"{images}patch_embedding.bias": (1,),
        f"{images}position_embedding.weight": (1, 1),
        **{f"{_TOWER}post_layernorm.{name}": (1,) for name in ("weight", "bias")},
        f"{_PROJECTOR}mm_input_projection_weight": (1, width),
        f"{_PROJECTOR}mm_soft_emb_norm.weight": (1,),
    }


T5GEMMA2 = t5gemma.T5GEMMA._replace(
    read=_read,
    write=_write,
    tensors=_tensors,
    inert=t5gemma.T5GEMMA.inert | {"image_token_index", "eoi_token_index"},
    blank=_blank,
    unread=(_TOWER, _PROJECTOR),
    compared=("T5Gemma2ForConditionalGeneration",),
)
