"""Model presets by name."""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from tasks import annexes
from tasks.terminal.command_line import UserError, nearest
from trainer.model.config import ModelConfig
from trainer.model.part_facts import ARCHITECTURES
from trainer.model.registry import FAMILIES

# 32,000 pieces and 100 sentinels, rounded up to a multiple of 128.
T5_VOCAB_SIZE = 32_128
# Source: T5X, `examples/t5/mt5/base.gin`.
MT5_VOCAB_SIZE = 250_112
# Source: the tokenizer of Touvron et al. 2023 (arXiv:2302.13971), section 2.1.
LLAMA_VOCAB_SIZE = 32_000
# Source: google-research/bert, the uncased vocabulary.
BERT_VOCAB_SIZE = 30_522


def _model(
    family: str,
    vocab_size: int,
    emb_dim: int,
    num_heads: int,
    head_dim: int,
    mlp_dim: int,
    num_layers: int,
    dropout_rate: float = 0.0,
) -> ModelConfig:
    architecture = ARCHITECTURES[FAMILIES[family].architecture]
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_encoder_layers=num_layers if architecture.encoder else 0,
        num_decoder_layers=num_layers if architecture.decoder else 0,
        dropout_rate=dropout_rate,
    )


def decoder(
    family: str,
    vocab_size: int,
    emb_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mlp_dim: int,
    num_layers: int,
) -> ModelConfig:
    """Returns a decoder-only model; `num_kv_heads` may equal `num_heads`."""
    model = _model(family, vocab_size, emb_dim, num_heads, head_dim, mlp_dim, num_layers)
    return replace(model, num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads)


_t5_1_0 = partial(_model, "t5_1_0", T5_VOCAB_SIZE)
_t5_1_1 = partial(_model, "t5_1_1", T5_VOCAB_SIZE)
_llama = partial(_model, "llama", LLAMA_VOCAB_SIZE)
_bert = partial(_model, "bert", BERT_VOCAB_SIZE)


# Columns: emb_dim, num_heads, head_dim, mlp_dim, layers per stack.
# Source: T5X, `examples/t5/t5_1_0/*.gin` and `examples/t5/t5_1_1/*.gin`; 1.0's tiny has
# 1.1's sizes. mini is ours: the smallest that learns something on a CPU in minutes.
_T5_1_0 = {
    "tiny": _t5_1_0(8, 4, 3, 16, 2),
    "small": _t5_1_0(512, 8, 64, 2048, 6),
    "base": _t5_1_0(768, 12, 64, 3072, 12),
    "large": _t5_1_0(1024, 16, 64, 4096, 24),
    "3b": _t5_1_0(1024, 32, 128, 16_384, 24),
    "11b": _t5_1_0(1024, 128, 128, 65_536, 24),
}
_T5_1_1 = {
    "tiny": _t5_1_1(8, 4, 3, 16, 2),
    "mini": _t5_1_1(128, 4, 32, 256, 2),
    "small": _t5_1_1(512, 6, 64, 1024, 8),
    "base": _t5_1_1(768, 12, 64, 2048, 12),
    "large": _t5_1_1(1024, 16, 64, 2816, 24),
    "xl": _t5_1_1(2048, 32, 64, 5120, 24),
    "xxl": _t5_1_1(4096, 64, 64, 10_240, 24),
}
_MT5 = {
    size: replace(config, vocab_size=MT5_VOCAB_SIZE)
    for size, config in _T5_1_1.items()
    if size not in ("tiny", "mini")
}
# Decoder-only models with T5 1.1's sizes, as in T5X's `examples/decoder_only/models/*.gin`; 1b has
# xl's widths.
_LM = {
    "1b" if size == "xl" else size: replace(_T5_1_1[size], family="lm", num_encoder_layers=0)
    for size in ("tiny", "small", "base", "large", "xl")
}
# Columns: emb_dim, num_heads, head_dim, mlp_dim, layers.
# Source: 7b, Touvron et al. 2023 (arXiv:2302.13971), table 2; 1b, the sizes of Sheared LLaMA 1.3B,
# Xia et al. 2023 (arXiv:2310.06694), table 1. tiny and mini are ours, for CPUs and small corpora.
_LLAMA = {
    "tiny": _llama(16, 2, 8, 32, 2),
    "mini": _llama(128, 4, 32, 352, 2),
    "1b": _llama(2048, 16, 128, 5504, 24),
    "7b": _llama(4096, 32, 128, 11_008, 32),
}
# Source: Grattafiori et al. 2024 (arXiv:2407.21783), table 3, for 8b; the config.json of
# meta-llama/Llama-3.2-1B and Llama-3.1-8B for the scaling of positions.
_LLAMA3_POSITION = "rotary:base=500000,scaling=llama3,factor={},original_positions=8192"
_LLAMA3 = {
    size: replace(
        _model("llama", 128_256, *sizes),
        num_kv_heads=8,
        norm="rms_norm:epsilon=1e-5",
        position=_LLAMA3_POSITION.format(factor),
        tied_logits=tied,
    )
    for size, sizes, factor, tied in (
        ("1b", (2048, 32, 64, 8192, 16), 32, True),
        ("8b", (4096, 32, 128, 14_336, 32), 8, False),
    )
}
# Columns: emb_dim, num_heads, head_dim, mlp_dim, then layers of the encoder and the decoder.
# Source: Xue et al. 2022 (arXiv:2105.13626), table 1; config.json of google/byt5-*.
_BYT5 = {
    size: replace(_model("t5_1_1", 384, *sizes, encoder), num_decoder_layers=decoder)
    for size, sizes, encoder, decoder in (
        ("small", (1472, 6, 64, 3584), 12, 4),
        ("base", (1536, 12, 64, 3968), 18, 6),
        ("large", (1536, 16, 64, 3840), 36, 12),
        ("xl", (2560, 32, 64, 6720), 36, 12),
        ("xxl", (4672, 64, 64, 12_352), 36, 12),
    )
}
# Source: Chung et al. 2023 (arXiv:2304.09151); config.json of google/umt5-*.
_UMT5 = {
    size: replace(_T5_1_1[size], vocab_size=256_384, position="relative_per_layer")
    for size in ("small", "base", "xl", "xxl")
}
# Source: config.json of EleutherAI/pile-t5-*: umT5's layers and Llama's vocabulary.
_PILE_T5 = {
    size: replace(_T5_1_1[size], position="relative_per_layer")
    for size in ("base", "large", "xl", "xxl")
}
# Columns: emb_dim, num_heads, head_dim, mlp_dim, layers, dropout_rate.
# Source: Devlin et al. 2019 (arXiv:1810.04805), section 3 and appendix A.2. mini has the sizes of
# BERT-Tiny of Turc et al. 2019 (arXiv:1908.08962) and, like tiny, is for CPUs and small corpora.
_BERT = {
    "tiny": _bert(16, 2, 8, 32, 2, 0.0),
    "mini": _bert(128, 2, 64, 512, 2, 0.0),
    "base": _bert(768, 12, 64, 3072, 12, 0.1),
    "large": _bert(1024, 16, 64, 4096, 24, 0.1),
}

# Source: Lingle 2024 (arXiv:2404.05728), section 3.1 and table 1: decoders by width, with T5's
# tokenizer and its sentinels. At the base width, initial logits of models from other families are
# as large as in the standard parametrisation.
_MUP_WIDTH = 128
_MUP = {
    f"dm{width}": replace(
        _model("llama", 32_100, width, width // _MUP_WIDTH, _MUP_WIDTH, 4 * width, 24),
        mlp_activations=("relu",),
        norm="rms_norm:epsilon=1e-5,gain=none",
        parametrisation=f"mup:base_width={_MUP_WIDTH}",
    )
    for width in (128, 256, 512, 1024, 2048, 4096, 8192)
} | {
    f"t5_1_1_{size}": replace(
        _T5_1_1[size], parametrisation=f"mup:base_width={_MUP_WIDTH},readout=relative"
    )
    for size in ("mini", "small", "base", "xl")
}

_CORE: Mapping[str, ModelConfig] = {
    **{
        f"{family}_{size}": config
        for family, sizes in (
            ("t5_1_0", _T5_1_0),
            ("t5_1_1", _T5_1_1),
            ("mt5", _MT5),
            ("umt5", _UMT5),
            ("byt5", _BYT5),
            ("pile_t5", _PILE_T5),
            ("lm", _LM),
            ("llama", _LLAMA),
            ("llama3", _LLAMA3),
            ("bert", _BERT),
        )
        for size, config in sizes.items()
    },
    **{f"mup_{size}": config for size, config in _MUP.items()},
}


class _Presets(Mapping[str, ModelConfig]):
    """The core's presets and the annexes', which are imported for a name that is not the core's."""

    @functools.cached_property
    def _all(self) -> dict[str, ModelConfig]:
        found = dict(_CORE)
        for presets in annexes.every("presets"):
            found |= presets()
        return found

    def __getitem__(self, name: str) -> ModelConfig:
        return _CORE[name] if name in _CORE else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


MODEL_PRESETS: Mapping[str, ModelConfig] = _Presets()


# Pattern of presets -> the optimizer of their source, which a preset does not set.
# Sources: `optimizer.OPTIMIZER_PRESETS`; Devlin et al. 2019, appendix A.2; Touvron et al. 2023
# (arXiv:2302.13971), section 2.2; Dubey et al. 2024 (arXiv:2407.21783), section 3.4.1.
_SOURCE_OPTIMIZERS = (
    (r"mup_dm\d+", "--optimizer_preset=mu_transformer"),
    (r"bert_\w+", "AdamW at 1e-4 with a linear schedule (docs/presets.md)"),
    (r"llama3?_\w+", "AdamW with a cosine schedule and clipping (docs/presets.md)"),
)


def source_optimizer(preset: str) -> str:
    """Returns the optimizer of a preset's source, or "" if it is T5X's or unknown."""
    known = (*annexes.entries("source_optimizers").items(), *_SOURCE_OPTIMIZERS)
    found = (words for names, words in known if re.fullmatch(names, preset))
    return next(found, "")


def model_preset(name: str) -> ModelConfig:
    """Returns the model called `name`; the UserError for an unknown name suggests the nearest."""
    if name not in MODEL_PRESETS:
        meant = _of_the_hub(name)
        hint = f" (did you mean {meant}?)" if meant else nearest(name, MODEL_PRESETS)
        raise UserError(
            f"unknown preset {name}{hint}: palimpsest pretrain --help=presets lists them"
        )
    return MODEL_PRESETS[name]


def _of_the_hub(name: str) -> str | None:
    """Returns the preset for a model name on the Hugging Face Hub, or None."""
    plain = name.rpartition("/")[2].lower().replace("-", "_")
    plain = plain.replace("t5_v1_1_", "t5_1_1_").removesuffix("_uncased").removesuffix("_cased")
    if plain.startswith("t5_") and not plain.startswith("t5_1_"):
        plain = plain.replace("t5_", "t5_1_0_", 1)
    return plain if plain in MODEL_PRESETS else None
