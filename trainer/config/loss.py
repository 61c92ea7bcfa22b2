"""Settings of the loss."""

import dataclasses

from tasks.terminal.flag_fields import BELOW_ONE, Checked, ReadIf, above, at_least, field

NORMALIZERS = ("sum", "num_real_target_tokens", "num_total_target_tokens", "average_per_sequence")
_NORMALIZED = ("batch", "microbatch")


@dataclasses.dataclass(frozen=True)
class LossConfig(Checked):
    """The loss, in T5X's terms.

    Adafactor ignores the gradient's scale. With it, "sum" and "num_*_target_tokens" differ only in
    the printed loss; "average_per_sequence" changes token weights.
    """

    z_loss: float = field(
        1e-4,
        "weight of log(Z)^2 in the loss, which keeps the softmax's normalizer near 1; 0: off",
        rule=at_least(0),
    )
    label_smoothing: float = field(
        0.0, "total probability of wrong tokens, in [0, 1)", rule=BELOW_ONE
    )
    normalizer: str = field(
        "sum",
        "divisor of the sum over tokens; sum: 1 (T5X's loss_normalizing_factor = None); "
        "num_real_target_tokens: the sum of weights; num_total_target_tokens: batch size times "
        "length; average_per_sequence: the number of sequences, each with weights that sum to 1",
        choices=NORMALIZERS,
    )
    normalize_over: str = field(
        "batch",
        "where the normalizer counts; batch: in the whole batch, so that the number of "
        "microbatches does not matter; microbatch: in each microbatch, adding the quotients as "
        "T5X does",
        choices=_NORMALIZED,
        read_if=ReadIf(
            lambda config: config.loss.normalizer != "sum" and config.is_divided,
            "unless --microbatches is set and --loss.normalizer is not sum",
            whole=True,
        ),
    )
    normalizing_constant: float | None = field(
        None,
        "constant divisor of the sum with normalizer sum, above 0",
        rule=above(0),
        read_if=ReadIf(
            lambda config: config.normalizer == "sum",
            lambda config: f"with normalizer {config.normalizer!r}",
        ),
    )
