"""The window that examples with unique sentinels were made of."""

import itertools
from collections.abc import Sequence


def rebuilt(inputs: Sequence[int], targets: Sequence[int], first_sentinel: int) -> list[int]:
    """Returns the window of inputs and targets without EOS.

    A sentinel of one side replaces the tokens of the other side up to that side's next sentinel.
    """

    def runs(tokens: Sequence[int]) -> list[list[int]]:
        out: list[list[int]] = [[]]
        for token in tokens:
            if token >= first_sentinel:
                out.append([])
            else:
                out[-1].append(token)
        return out

    shown, hidden = runs(inputs), runs(targets)
    if len(shown) == len(hidden) == 1:  # a prefix and its rest
        return shown[0] + hidden[0]
    # Where the window begins with noise, inputs begin with a sentinel and targets do not.
    noise_first = not shown[0] and hidden[0]
    sides = (hidden, shown[1:]) if noise_first else (shown, hidden[1:])
    turns = itertools.chain(*itertools.zip_longest(*sides, fillvalue=[]))
    return list(itertools.chain(*turns))
