"""Encoder-decoders made of decoders: their model, and the parameters that they start with.

Both stacks begin as the decoder, and cross-attention as self-attention, unless it is merged into
self-attention; the encoder loses its causal mask.

Source: T5Gemma (arXiv:2504.06225), section 3.1; T5Gemma 2 (arXiv:2512.14856), section 2, for merged
attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from tasks.terminal.command_line import UserError
from trainer.model.capabilities import DECODER
from trainer.model.config import ModelConfig
from trainer.zoo.windows import Sliding

# The family whose parts are those of decoders such as Gemma; the model names all its parts itself.
_FAMILY = "t5gemma"
_Leaf = TypeVar("_Leaf")


def encoder_decoder(decoder: ModelConfig, source: str) -> ModelConfig:
    """Returns the encoder-decoder with a decoder's layers in both stacks.

    Local layers of the encoder see as many tokens on either side as the decoder's see behind.
    Raises UserError, which names `source`, if it is no decoder or has a part that none can have.
    """
    if decoder.architecture != DECODER:
        raise UserError(f"--adapt: {source} is a {decoder.family} model, not a decoder-only one")
    try:
        own = decoder.explicit()
        window = own.part("attention_window")
        if isinstance(window.options, Sliding):
            wide = replace(window.options, reach=window.options.window)
            window = window._replace(options=wide)
        return replace(
            own,
            family=_FAMILY,
            num_encoder_layers=own.num_decoder_layers,
            shared_embedding=False,
            attention_window=str(window),
        )
    except ValueError as error:
        raise UserError(f"--adapt: {source}: {error}") from error


def parameters(decoder: Mapping[str, _Leaf], model: ModelConfig) -> dict[str, _Leaf]:
    """Returns an encoder-decoder's leaves by path, from those of the unscanned decoder."""
    found: dict[str, _Leaf] = {}
    for path, leaf in decoder.items():
        found[path] = leaf
        if "logits_dense" not in path:
            of_encoder = path.replace("decoder", "encoder")
            found[of_encoder.replace("self_attention", "attention")] = leaf
        if "self_attention" in path and not model.facts("cross_attention").merges:
            norm = path.replace("_self_attention_layer_norm", "_cross_attention_layer_norm")
            found[norm.replace("/self_attention/", "/encoder_decoder_attention/")] = leaf
    if model.shared_embedding:
        table = found.pop("encoder/token_embedder/embedding")
        del found["decoder/token_embedder/embedding"]
        found["token_embedder/embedding"] = table
    return found
