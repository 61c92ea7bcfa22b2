"""Settings for LoRA. No JAX."""

import dataclasses
from typing import ClassVar

from tasks.terminal.flag_fields import ReadIf, above, at_least, check, field
from trainer.config.field_paths import check_pattern

# Key of LoRA's parameters in a run's tree; below it are the kernels' own paths.
LORA = "lora"
_ATTENTION = r"attention/(query|key|value|out)/kernel$"


_WITH_RANK = ReadIf(lambda config: config.rank is not None, "without --lora.rank")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA: low-rank additions, trained instead of kernels.

    A kernel W [in, out] becomes W + alpha / rank * A B, with A [in, rank] drawn and B [rank, out]
    initially 0. Exports hold the sum.

    Source: Hu et al. 2021 (arXiv:2106.09685).
    Differences: every step forms the sum; the paper adds the two products with the activations.
    This saves activation memory, but takes as many operations as full fine-tuning.
    """

    # Fields that decide which arrays a state has.
    OF_STATE: ClassVar[tuple[str, ...]] = ("rank", "kernels")

    rank: int | None = field(None, "rank of the additions; None: no LoRA", rule=at_least(1))
    alpha: float | None = field(
        None,
        "numerator of the additions' factor alpha / rank; None: the rank",
        rule=above(0),
        read_if=_WITH_RANK,
    )
    kernels: str | None = field(
        None,
        "add to kernels whose path contains a match of this regular expression; None: "
        f"attention's, {_ATTENTION}",
        read_if=_WITH_RANK,
    )

    def __post_init__(self) -> None:
        check(self)
        check_pattern("LoraConfig.kernels", self.kernels)

    @property
    def on(self) -> bool:
        return self.rank is not None

    @property
    def scale(self) -> float:
        rank = self.rank or 1
        return (self.alpha or rank) / rank

    @property
    def pattern(self) -> str:
        return self.kernels or _ATTENTION
