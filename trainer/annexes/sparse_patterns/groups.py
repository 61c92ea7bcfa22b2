"""Query blocks in groups that visit similar numbers of key blocks. No JAX.

Dimensions: P heads with their own layouts (1 if all share one), N blocks in a row, M the most
blocks that one visits, n rows in a group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Group(NamedTuple):
    """Query blocks that visit similar numbers of key blocks.

    `key_PnM`, int32, holds the key blocks that each of `query_n` visits, padded with 0; `real_PnM`,
    bool, is False at the padding.
    """

    query_n: np.ndarray
    key_PnM: np.ndarray
    real_PnM: np.ndarray


# The accepted overhead of padding; and the most groups, each of which is compiled separately.
_WASTE, _GROUPS = 1.05, 8


def groups_of(layout_PNN: np.ndarray) -> list[Group]:
    """Returns query blocks in groups, so that rows with global blocks do not pad other rows."""
    count_N = layout_PNN.sum(axis=2).max(axis=0)
    order_N = np.argsort(count_N, kind="stable")
    groups = []
    for query_n in np.split(order_N, _borders(count_N[order_N])):
        query_n = np.sort(query_n)
        chosen_PnN = layout_PNN[:, query_n]
        most = int(chosen_PnN.sum(axis=2).max())
        # A stable sort puts the visited blocks first, in order.
        key_PnM = np.argsort(~chosen_PnN, axis=2, kind="stable")[:, :, :most]
        real_PnM = np.take_along_axis(chosen_PnN, key_PnM, axis=2)
        key_PnM = np.where(real_PnM, key_PnM, 0)
        groups.append(Group(query_n.astype(np.int32), key_PnM.astype(np.int32), real_PnM))
    return groups


def _borders(count_N: np.ndarray) -> list[int]:
    """Returns where to cut sorted counts so that padding each part to its maximum is small."""
    ends = [*(np.flatnonzero(np.diff(count_N)) + 1), len(count_N)]
    starts = np.array([0, *ends[:-1]])
    cost_E = np.array([end * count_N[end - 1] for end in ends], float)
    cuts: list[list[int]] = [[] for _ in ends]
    for _ in range(_GROUPS - 1):
        if cost_E[-1] <= _WASTE * count_N.sum():
            break
        parts = []
        for index, end in enumerate(ends):
            # The last part begins after the end of an earlier one.
            last = (end - starts[1 : index + 1]) * count_N[end - 1]
            options = cost_E[:index] + last
            best = int(np.argmin(options)) if index else -1
            better = index and options[best] < cost_E[index]
            cut = (options[best], [*cuts[best], ends[best]]) if better else None
            parts.append(cut or (cost_E[index], cuts[index]))
        cost_E = np.array([cost for cost, _ in parts])
        cuts = [cut for _, cut in parts]
    return [int(cut) for cut in cuts[-1]]
