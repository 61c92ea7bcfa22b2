"""The base class of objectives, which make examples from windows of tokens.

Dimensions: W windows, N tokens per window.
"""

import abc
import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

from tasks.document_kind import DocumentKind
from tasks.objectives.noise import Array
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds

# Feature -> (int32 [W, any] padded with 0, lengths int64 [W]).
Examples = dict[str, tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of an example's features in tokens, EOS included; `inputs` is 0 if there are none."""

    inputs: int
    targets: int


class Kind(NamedTuple):
    """A kind of example, or of two examples whose lengths add up to a constant."""

    share: float  # weight of its examples among all examples
    choice: int  # number of the kind in its objective
    members: int  # examples packed into one row together, 1 or 2; the second mirrors the first
    # inputs, targets: total lengths of these examples, EOS included.
    inputs: int
    targets: int


class Slots(NamedTuple):
    """The kinds of examples that windows become."""

    choices_W: Array  # int64 [W], numbers of kinds
    # bool [W], True for an example that mirrors the previous one and has its key.
    mirrored_W: Array


class Objective(abc.ABC):
    """Makes examples from windows; a pure function of tokens and noise keys.

    Subclasses are frozen dataclasses whose fields are the objective's settings. They define
    `features`, `window_tokens`, `sentinels` and `examples`; everything else has a default.
    """

    @property
    @abc.abstractmethod
    def features(self) -> tuple[str, ...]:
        """Names of an example's features.

        "inputs" and "targets" are ids. "weights" (0 or 1 per target) marks targets that count in
        the loss; without it, all do. "prefix" is 1 where a decoder attends in both directions. For
        "segments" and "order", see `MaskedLM`.
        """

    @abc.abstractmethod
    def window_tokens(self, lengths: Lengths) -> int:
        """Returns the corpus tokens per example; raises UserError if the lengths are unsuitable."""

    @abc.abstractmethod
    def sentinels(self, lengths: Lengths) -> int:
        """Returns the maximum number of sentinels in one example."""

    @abc.abstractmethod
    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        """Returns the examples made from windows.

        `tokens_WN`, int32 [W, N], are windows of at most `window_tokens` tokens, padded with 0, and
        `lengths_W`, int64 [W], their lengths; `keys_W`, uint64 [W], are noise keys. Sentinels are
        the last of `ids`, descending.
        """

    def kinds(self, lengths: Lengths) -> tuple[Kind, ...]:
        """Returns the kinds of examples; raises UserError if their lengths depend on tokens."""
        raise UserError(
            f"examples of {words(self)} cannot be packed because their lengths are unknown before "
            "they are made: leave out --data.pack_examples"
        )

    def packed_examples(
        self,
        tokens_WN: Array,
        lengths_W: Array,
        keys_W: Array,
        slots: Slots,
        lengths: Lengths,
        ids: TokenIds,
    ) -> Examples:
        """Returns examples like `examples`, of the kinds given by `slots`."""
        return self.examples(tokens_WN, lengths_W, keys_W, lengths, ids)

    @property
    def pieces(self) -> tuple[str, ...]:
        """Texts of the pieces that the vocabulary must have."""
        return ()

    @property
    def separator(self) -> str | None:
        """Required separator after documents in the cache, "none" or "eos"; None for either."""
        return None

    @property
    def unit(self) -> DocumentKind:
        """The unit of a window; a pair's window is inputs, PAIR_BORDER, targets."""
        return DocumentKind.TEXT

    @property
    def cuts_sides(self) -> bool:
        """True if overlong sides of pairs are cut, not refused."""
        return True

    def cutting_sides(self) -> "Objective":
        """Returns this objective with `cuts_sides` set."""
        return self

    def sides(self, lengths: Lengths) -> tuple[int, int]:
        """Returns the maximum ids of a pair's (inputs, targets); raises UserError if one is 0."""
        raise NotImplementedError(f"{type(self).__name__} reads no pairs")

    @property
    def architectures(self) -> tuple[str, ...]:
        """Usable architectures ("encoder_decoder", "decoder", "encoder"), the most common first."""
        return ("encoder_decoder", "decoder") if "inputs" in self.features else ("decoder",)

    @property
    def codes_text(self) -> bool:
        """True if targets with a loss are corpus tokens, each predicted from all tokens before it.

        Only then are bits per byte and perplexity per word defined.
        """
        return False

    @property
    def appends_eos(self) -> bool:
        """True if every example's targets end in an EOS that is not in the window."""
        return False

    def describe(self, key: np.integer | Array) -> str:
        """Describes the objective and its settings under a noise key."""
        return words(self)

    def describe_choice(self, key: np.integer | Array, choice: int) -> str:
        """Describes an example of kind `choice`, an index in `kinds`."""
        return self.describe(key)


def words(value: Any) -> str:
    """Describes a dataclass as its name and, in brackets, its fields except tuples."""
    if not dataclasses.is_dataclass(value):
        text = str(value)
        return text if "<" in text else text.replace("_", " ")
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(value).__name__)
    name = " ".join(word if word.isupper() else word.lower() for word in name.split())
    fields = [
        f"{field.name.replace('_', ' ')} {words(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if not isinstance(getattr(value, field.name), tuple)
    ]
    return f"{name} ({', '.join(fields)})" if fields else name


def with_eos(tokens_WN: Array, lengths_W: Array, ids: TokenIds) -> tuple[Array, Array]:
    """Appends an EOS to each window: (tokens int32 [W, N + 1], lengths + 1)."""
    out_WN = np.zeros((tokens_WN.shape[0], tokens_WN.shape[1] + 1), np.int32)
    out_WN[:, :-1] = tokens_WN
    out_WN[np.arange(len(out_WN)), lengths_W] = ids.special.eos
    return out_WN, lengths_W + 1
