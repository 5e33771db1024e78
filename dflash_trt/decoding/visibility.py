"""The rows of a pass as nodes of trees: how deep each lies, and which others it sees."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def tree_rows(parents: Array) -> dict[str, Array]:
    """The target's inputs for trees with these parents [n, N], as in `Draft`.

    depths: int64 [n, N], 0 for the anchor.
    visible: bool [n, N, N]. A node sees itself and its ancestors.
    """
    count, nodes = parents.shape
    slots = np.arange(count)
    visible = np.zeros((count, nodes, nodes), bool)
    for node in range(nodes):
        if node:  # the parent comes first
            visible[:, node] = visible[slots, parents[:, node]]
        visible[:, node, node] = True
    return {"depths": visible.sum(axis=2) - 1, "visible": visible}


class ChainRows:
    """The same inputs for chains of any length: copies from one triangle, which grows."""

    def __init__(self) -> None:
        self._triangle: Array = np.ones((1, 1), bool)

    def __call__(self, count: int, nodes: int) -> dict[str, Array]:
        if nodes > len(self._triangle):
            self._triangle = np.tri(nodes, dtype=bool)
        return {
            "depths": np.tile(np.arange(nodes), (count, 1)),
            "visible": np.tile(self._triangle[:nodes, :nodes], (count, 1, 1)),
        }
