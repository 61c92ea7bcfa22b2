"""The supervised objective: a pair's inputs and targets unchanged."""

import dataclasses

import numpy as np

from tasks.document_kind import DocumentKind
from tasks.objectives import noise
from tasks.objectives.noise import Array
from tasks.objectives.objective import Examples, Lengths, Objective, with_eos
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import check, field
from tasks.vocabularies.token_ids import TokenIds
from tasks.vocabulary import PAIR_BORDER

REFUSE, CUT = "refuse", "cut"


@dataclasses.dataclass(frozen=True)
class Supervised(Objective):
    """Supervised learning from pairs: an EOS ends the targets and, if `inputs_eos`, the inputs.

    A decoder-only model gets both in one row, with the loss on the targets.

    Source: T5's supervised tasks, `append_eos_after_trim` of seqio `preprocessors.py`.
    Differences: T5 always cuts overlong sides; here this is done only on request.
    """

    too_long: str = field(
        REFUSE,
        "what to do with pairs with a side longer than its feature: refuse = do not start the run, "
        "cut = use the beginning of the side",
        choices=(REFUSE, CUT),
    )
    inputs_eos: bool = field(True, "end the inputs with an EOS")
    features = ("inputs", "targets")
    unit = DocumentKind.PAIR
    appends_eos = True

    def __post_init__(self) -> None:
        check(self)

    @property
    def cuts_sides(self) -> bool:
        return self.too_long == CUT

    def cutting_sides(self) -> Objective:
        return dataclasses.replace(self, too_long=CUT)

    def sides(self, lengths: Lengths) -> tuple[int, int]:
        most = lengths.inputs - self.inputs_eos, lengths.targets - 1
        if min(most) < 1:
            raise UserError(
                "pairs need inputs and targets of at least 2 positions each, including the EOS"
            )
        return most

    def window_tokens(self, lengths: Lengths) -> int:
        return sum(self.sides(lengths)) + 1

    def sentinels(self, lengths: Lengths) -> int:
        return 0

    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        width = tokens_WN.shape[1]
        border_W = np.argmax(tokens_WN == PAIR_BORDER, axis=1)
        inputs_WN = np.where(noise.within(border_W, width), tokens_WN, 0)
        inputs_WN = inputs_WN[:, : int(border_W.max(initial=0))]
        targets_W = lengths_W - border_W - 1
        from_WN = border_W[:, None] + 1 + np.arange(int(targets_W.max(initial=0)))
        targets_WN = np.take_along_axis(tokens_WN, np.minimum(from_WN, width - 1), axis=1)
        targets_WN = np.where(noise.within(targets_W, targets_WN.shape[1]), targets_WN, 0)
        inputs = with_eos(inputs_WN, border_W, ids) if self.inputs_eos else (inputs_WN, border_W)
        return {"inputs": inputs, "targets": with_eos(targets_WN, targets_W, ids)}
