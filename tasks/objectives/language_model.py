"""Language models: the targets are the window itself.

Dimensions: W windows, N tokens per window.
"""

import dataclasses

import numpy as np

from tasks.objectives import noise
from tasks.objectives.noise import Array
from tasks.objectives.objective import Examples, Lengths, Objective, with_eos
from tasks.terminal.command_line import UserError
from tasks.vocabularies.token_ids import TokenIds


@dataclasses.dataclass(frozen=True)
class AutoregressiveLM(Objective):
    """Autoregressive language modelling: the window is the targets, without inputs.

    If `eos` is "window", an EOS ends every window (T5's `lm`). If it is "document", the cache has
    an EOS after every document and none is added (T5's `full_lm`). Their losses are not comparable:
    the EOS of a window is always at the same position.

    Source: T5 `data/preprocessors.py`, lm and full_lm.
    """

    eos: str = "window"
    features = ("targets",)
    codes_text = True

    def __post_init__(self) -> None:
        if self.eos not in ("window", "document"):
            raise ValueError(f"AutoregressiveLM.eos is {self.eos!r}, not 'window' or 'document'")

    @property
    def separator(self) -> str | None:
        return "eos" if self.eos == "document" else None

    @property
    def appends_eos(self) -> bool:
        return self.eos == "window"

    def window_tokens(self, lengths: Lengths) -> int:
        if lengths.targets < 2:
            raise UserError("an autoregressive LM needs targets of at least 2 positions")
        return lengths.targets - (self.eos == "window")

    def sentinels(self, lengths: Lengths) -> int:
        return 0

    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        made = with_eos(tokens_WN, lengths_W, ids) if self.appends_eos else (tokens_WN, lengths_W)
        return {"targets": made}


@dataclasses.dataclass(frozen=True)
class DecoderPrefixLM(Objective):
    """Prefix LM for a decoder-only model.

    Attention is bidirectional in a prefix of uniform length; the loss is on the rest of the window.
    No EOS is added. Feature "prefix" is 1 on the prefix and on the next position, whose input is
    the prefix's last token.

    Source: Raffel et al. 2020, section 3.2.3; T5 `data/preprocessors.py`,
    pack_prefix_lm_decoder_only.
    """

    features = ("targets", "weights", "prefix")
    codes_text = True

    def window_tokens(self, lengths: Lengths) -> int:
        if lengths.targets < 2:
            raise UserError("a prefix LM needs targets of at least 2 positions")
        return lengths.targets

    def sentinels(self, lengths: Lengths) -> int:
        return 0

    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        width = tokens_WN.shape[1]
        prefix_WN = noise.prefix_mask(keys_W, lengths_W, width)
        place_W = np.count_nonzero(prefix_WN, axis=1)
        weights_WN = noise.within(lengths_W, width) & ~prefix_WN
        return {
            "targets": (tokens_WN, lengths_W),
            "weights": (weights_WN.astype(np.int32), lengths_W),
            "prefix": (noise.within(place_W + 1, width).astype(np.int32), place_W + 1),
        }
