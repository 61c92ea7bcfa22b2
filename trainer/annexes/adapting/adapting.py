"""Models made of decoders, and the parameters that they start with: `--adapt`.

In an encoder-decoder both stacks begin as a decoder, and cross-attention as self-attention, with
new kernels, or merged into self-attention. An encoder begins as the decoder, without its causal
mask; its heads are new.

Source: T5Gemma (arXiv:2504.06225), section 3.1; T5Gemma 2 (arXiv:2512.14856), section 2, for merged
attention; LLM2Vec (arXiv:2404.05961), section 2, for encoders.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from tasks.terminal.command_line import UserError
from trainer.annexes.adapting.options import AdaptingConfig
from trainer.config import from_transformers
from trainer.model.config import ModelConfig, encoder_sizes
from trainer.model.config_checks import SIZES
from trainer.model.windows import Sliding

# Families whose parts may be any decoder's; the models name all their parts themselves.
_FAMILIES = {"encoder_decoder": "t5gemma", "encoder": "bert_pre_ln"}
_CROSS = re.compile(r".*/(encoder_decoder_attention/.*|\w+_cross_attention_layer_norm/.*)")
_HEADS = re.compile(r"(mlm_head|order_head)/.*")
_Leaf = TypeVar("_Leaf")


def model_of(settings: AdaptingConfig, decoder: ModelConfig, source: str) -> ModelConfig:
    """Returns the model that the settings of a run make of the decoder in `source`."""
    from trainer import huggingface  # here because a run that has begun needs no other library

    second = None
    if settings.encoder:
        folder = settings.encoder.removeprefix(from_transformers.PREFIX)
        second = huggingface.model_config(folder), settings.encoder
    return adapted(str(settings.to), decoder, source, second)


def adapted(
    kind: str, decoder: ModelConfig, source: str, encoder: tuple[ModelConfig, str] | None = None
) -> ModelConfig:
    """Returns the model of a `kind` of --adapt with a decoder's layers.

    `encoder` is another decoder, whose layers the encoder has, and its source. Local layers of an
    encoder see as many tokens on either side as the decoder's see behind. Raises UserError, which
    names a source, if it is no decoder or has a part that none can have.
    """
    for model, where in [(decoder, source), *([encoder] if encoder else [])]:
        if model.has_encoder:
            raise UserError(f"--adapt: {where} is a {model.family} model, not a decoder-only one")
    first, where = encoder or (decoder, source)
    try:
        own, first = decoder.explicit(), first.explicit()
        _check_alike(own, first, f"--adapt_encoder={where}", source)
        window, position = own.part("attention_window"), own.part("position")
        if isinstance(window.options, Sliding):
            wide = replace(window.options, reach=window.options.window)
            window = window._replace(options=wide)
        changes: dict[str, Any] = {
            "family": _FAMILIES[kind],
            "num_encoder_layers": first.num_decoder_layers,
            "attention_window": str(window),
        }
        if kind == "encoder_decoder":
            sizes = encoder_sizes(first, own)
            return replace(own, shared_embedding=False, encoder_sizes=sizes, **changes)
        if getattr(position.options, "fraction", 1) is None:
            position = position._replace(options=replace(position.options, fraction=1.0))
        changes |= {"num_decoder_layers": 0, "token_types": 0, "logits_softcap": None}
        return replace(own, position=str(position), **changes)
    except ValueError as error:
        raise UserError(f"--adapt: {source}: {error}") from error


def _check_alike(decoder: ModelConfig, encoder: ModelConfig, flag: str, source: str) -> None:
    others = {*SIZES, "num_decoder_layers", "max_positions"}
    names = [field.name for field in fields(decoder) if field.name not in others]
    if differ := [name for name in names if getattr(decoder, name) != getattr(encoder, name)]:
        raise UserError(
            f"{flag} differs from {source} in {', '.join(differ)}: stacks may differ in "
            f"{', '.join(SIZES)} and their number of layers"
        )


def has_new_cross(model: ModelConfig, cross: str | None) -> bool:
    """Returns whether cross-attention of an encoder-decoder starts with new kernels.

    `cross` is the value of --adapt_cross; raises UserError if it is impossible.
    """
    if cross is not None and model.facts("cross_attention").merges:
        raise UserError(
            f"--adapt_cross={cross} has no effect with --model.cross_attention="
            f"{model.cross_attention}, which has no kernels of its own"
        )
    other_width = model.of_encoder.emb_dim != model.emb_dim
    if cross == "self_attention" and other_width:
        raise UserError(
            f"--adapt_cross=self_attention: the encoder has width {model.of_encoder.emb_dim}, the "
            f"decoder {model.emb_dim}: use --adapt_cross=new"
        )
    return cross == "new" or other_width


def is_new(path: str, model: ModelConfig) -> bool:
    """Returns whether a parameter may be new: cross-attention's, or one of an encoder's heads."""
    return bool((_CROSS if model.has_decoder else _HEADS).fullmatch(path))


def parameters(
    decoder: Mapping[str, _Leaf], encoder: Mapping[str, _Leaf], model: ModelConfig, new: bool
) -> dict[str, _Leaf]:
    """Returns a model's leaves by path, without new ones.

    They come from the leaves of two unscanned decoders; the encoder starts as the second. All of
    cross-attention is new with `new`.
    """
    found = dict(_as_encoder(encoder))
    if not model.has_decoder:
        table = found.pop("encoder/token_embedder/embedding")
        found["token_embedder/embedding"] = table
        if "decoder/logits_dense/kernel" in decoder:
            found["mlm_head/logits_dense/kernel"] = decoder["decoder/logits_dense/kernel"]
        return found
    crosses = not new and not model.facts("cross_attention").merges
    for path, leaf in decoder.items():
        found[path] = leaf
        if crosses and "self_attention" in path:
            norm = path.replace("_self_attention_layer_norm", "_cross_attention_layer_norm")
            found[norm.replace("/self_attention/", "/encoder_decoder_attention/")] = leaf
    if model.shared_embedding:
        table = found.pop("encoder/token_embedder/embedding")
        del found["decoder/token_embedder/embedding"]
        found["token_embedder/embedding"] = table
    return found


def _as_encoder(decoder: Mapping[str, _Leaf]) -> Iterator[tuple[str, _Leaf]]:
    for path, leaf in decoder.items():
        if "logits_dense" not in path:
            of_encoder = path.replace("decoder", "encoder")
            yield of_encoder.replace("self_attention", "attention"), leaf
