"""Settings of models made of decoders. No JAX."""

import dataclasses

from tasks.terminal.flag_fields import Checked, ReadIf, Rule, field

_OF_FOLDER = ReadIf(
    lambda config: (config.init_from or "").startswith("hf:"),
    "without --init_from=hf:DIR",
    whole=True,
)
_TWO_STACKS = ReadIf(
    lambda settings: settings.to == "encoder_decoder", "without --adapt=encoder_decoder"
)


@dataclasses.dataclass(frozen=True)
class AdaptingConfig(Checked):
    """Another model made of the decoder in a folder of transformers."""

    to: str | None = field(
        None,
        "make another model of the decoder that init_from=hf:DIR names: an encoder-decoder whose "
        "stacks start as the decoder, as in T5Gemma, or an encoder",
        choices=("encoder_decoder", "encoder"),
        aliases=("--adapt",),
        read_if=_OF_FOLDER,
    )
    encoder: str | None = field(
        None,
        "hf:DIR, another decoder with the same vocabulary and perhaps other sizes, as which the "
        "encoder starts",
        rule=Rule("hf:DIR", lambda name: name.startswith("hf:")),
        aliases=("--adapt_encoder",),
        read_if=_TWO_STACKS,
    )
    cross: str | None = field(
        None,
        "cross-attention starts as the decoder's self-attention, or with new kernels; by default "
        "new if the encoder has another width",
        choices=("self_attention", "new"),
        aliases=("--adapt_cross",),
        read_if=_TWO_STACKS,
    )

    @property
    def on(self) -> bool:
        return self.to is not None

    def __str__(self) -> str:
        return f"--adapt={self.to}"
