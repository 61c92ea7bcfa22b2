"""UL2's mixture of denoisers: one of several objectives denoises each window.

Dimensions: W windows, N tokens per window, L positions per feature.
"""

import dataclasses

import numpy as np

from tasks.objectives import noise
from tasks.objectives.denoising import Denoising, prefix_lm, span_corruption
from tasks.objectives.noise import Array
from tasks.objectives.objective import Examples, Kind, Lengths, Objective, Slots, words
from tasks.terminal.command_line import UserError
from tasks.vocabularies.token_ids import TokenIds
from tasks.vocabulary import sentinel_piece

_CHOICE, _OFFSET, _NOISE = 11, 12, 13  # streams of a window's key


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """One objective of the mixture: `rate` is its weight, `mode` the first piece of its inputs."""

    objective: Denoising
    rate: float
    mode: str


# Mode tokens for vocabularies without such pieces: the last three of a hundred sentinels.
R, X, S = (sentinel_piece(number) for number in (99, 98, 97))


def ul2_denoisers(
    regular: str = R, extreme: str = X, sequential: str = S, sequential_rate: float = 0.2
) -> tuple[Denoiser, ...]:
    """Returns UL2's seven denoisers; arguments name the pieces that serve as [R], [X] and [S].

    Regular and extreme denoising split the rest of the rate equally.

    Source: Tay et al. 2022 (arXiv:2205.05131), table 1 and section 4.5.
    """
    rate = (1 - sequential_rate) / 2
    short = ((3.0, 0.15), (8.0, 0.15))
    long = ((3.0, 0.5), (8.0, 0.5), (64.0, 0.15), (64.0, 0.5))
    return (
        *(Denoiser(span_corruption(d, mean), rate / len(short), regular) for mean, d in short),
        *(Denoiser(span_corruption(d, mean), rate / len(long), extreme) for mean, d in long),
        Denoiser(prefix_lm(0.25), sequential_rate, sequential),
    )


@dataclasses.dataclass(frozen=True)
class MixtureOfDenoisers(Objective):
    """A window's noise key chooses its denoiser; inputs begin with the denoiser's mode.

    A window is as long as the longest denoiser needs. A denoiser that needs less reads a part that
    starts at a random position, different in each epoch, so that no token is always left out.

    Source: Tay et al. 2022 (arXiv:2205.05131).
    Differences: UL2's code for T5 gives every denoiser its own share of the documents, cut to its
    own lengths; here all denoisers read the same windows, so one cache and one order serve any
    rates. Raises ValueError if a rate is negative or all are 0.
    """

    denoisers: tuple[Denoiser, ...] = ul2_denoisers()
    features = ("inputs", "targets")
    appends_eos = True

    def __post_init__(self) -> None:
        rates = [denoiser.rate for denoiser in self.denoisers]
        if min(rates, default=0) < 0 or sum(rates) <= 0:
            raise ValueError(f"rates of denoisers must not be negative or all 0, but are {rates}")

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(denoiser.mode for denoiser in self.denoisers))

    def window_tokens(self, lengths: Lengths) -> int:
        inner = _without_mode(lengths)
        return max(denoiser.objective.window_tokens(inner) for denoiser in self.denoisers)

    def sentinels(self, lengths: Lengths) -> int:
        """Returns the maximum over denoisers; raises UserError if those include a mode token."""
        inner = _without_mode(lengths)
        spans = max(denoiser.objective.sentinels(inner) for denoiser in self.denoisers)
        for number in range(spans):
            if sentinel_piece(number) in self.pieces:
                raise UserError(
                    f"at inputs length {lengths.inputs} a denoiser needs {spans} sentinels, but "
                    f"{sentinel_piece(number)} is a mode token: use shorter inputs, or a "
                    f"vocabulary with {spans + len(self.pieces)} sentinels and modes from "
                    f"{sentinel_piece(spans)} on"
                )
        return spans

    def kinds(self, lengths: Lengths) -> tuple[Kind, ...]:
        inner = _without_mode(lengths)
        found = []
        for number, denoiser in enumerate(self.denoisers):
            for kind in denoiser.objective.kinds(inner):
                inputs = kind.inputs + kind.members  # each begins with its mode
                share = denoiser.rate * kind.share
                found.append(Kind(share, number, kind.members, inputs, kind.targets))
        return tuple(found)

    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        none_W = np.zeros(len(keys_W), bool)
        slots = Slots(self.choices(keys_W), none_W)
        return self.packed_examples(tokens_WN, lengths_W, keys_W, slots, lengths, ids)

    def packed_examples(
        self,
        tokens_WN: Array,
        lengths_W: Array,
        keys_W: Array,
        slots: Slots,
        lengths: Lengths,
        ids: TokenIds,
    ) -> Examples:
        inner, windows = _without_mode(lengths), len(tokens_WN)
        sides = {"inputs": lengths.inputs, "targets": lengths.targets}
        rows = {name: np.zeros((windows, width), np.int32) for name, width in sides.items()}
        sizes = {name: np.zeros(windows, np.int64) for name in sides}
        for number, denoiser in enumerate(self.denoisers):
            mine = np.flatnonzero(slots.choices_W == number)
            if not len(mine):
                continue
            parts_WN, parts_W = _parts(
                tokens_WN[mine],
                lengths_W[mine],
                noise.fold_in(keys_W[mine], _OFFSET),
                denoiser.objective.window_tokens(inner),
            )
            made = denoiser.objective.packed_examples(
                parts_WN,
                parts_W,
                noise.fold_in(keys_W[mine], _NOISE),
                Slots(slots.choices_W[mine], slots.mirrored_W[mine]),
                inner,
                ids,
            )
            rows["inputs"][mine, 0] = ids.id_of(denoiser.mode)
            for name, after in (("inputs", 1), ("targets", 0)):
                values_WN, counts_W = made[name]
                rows[name][mine, after : after + values_WN.shape[1]] = values_WN
                sizes[name][mine] = counts_W + after
        return {name: (rows[name], sizes[name]) for name in sides}

    def describe(self, key: np.integer | Array) -> str:
        return self.describe_choice(key, int(self.choices(np.array([key], np.uint64))[0]))

    def describe_choice(self, key: np.integer | Array, choice: int) -> str:
        chosen = self.denoisers[choice]
        return f"UL2, mode {chosen.mode}: {words(chosen.objective)}"

    def choices(self, keys_W: Array) -> Array:
        """Returns the index of each window's denoiser, int64 [W]."""
        rates = np.array([denoiser.rate for denoiser in self.denoisers])
        borders = np.cumsum(rates / rates.sum())[:-1]
        draws_W = noise.uniforms(noise.fold_in(keys_W, _CHOICE), 1)[:, 0]
        return np.searchsorted(borders, draws_W, side="right")


def _without_mode(lengths: Lengths) -> Lengths:
    return Lengths(lengths.inputs - 1, lengths.targets)


def _parts(tokens_WN: Array, lengths_W: Array, keys_W: Array, width: int) -> tuple[Array, Array]:
    """Returns (tokens, lengths) of at most `width` tokens of each window from a random position."""
    parts_W = np.minimum(lengths_W, width)
    first_W = noise.integers(keys_W, 0, lengths_W - parts_W)
    columns_WN = np.minimum(first_W[:, None] + np.arange(width), tokens_WN.shape[1] - 1)
    parts_WN = np.take_along_axis(tokens_WN, columns_WN, axis=1)
    return np.where(noise.within(parts_W, width), parts_WN, 0), parts_W
