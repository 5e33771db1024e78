"""Search for many patterns at once. The cost per symbol does not depend on their number.

Aho and Corasick 1975, "Efficient string matching". Symbols are integers: code points of stop strings, or tokens of
bad words.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator


class Automaton:
    """Patterns as states. A state is the longest suffix of the input that begins a pattern; state 0 is empty.

    Equal patterns share a state. An empty pattern ends at every state.
    """

    def __init__(self, patterns: Iterable[Iterable[int]]) -> None:
        self._next: dict[int, int] = {}  # key: state << 32 | symbol
        self.depth = array("i", [0])  # symbols of each state
        self.state_of = [self._add(pattern) for pattern in patterns]  # the end state of each pattern
        ends = set(self.state_of)
        self._shorter = array("i", [0]) * len(
            self.depth
        )  # the longest other state that is a suffix of this one
        # The state of the longest pattern that ends at a state; -1 if there is none.
        self.longest = array("i", [0 if 0 in ends else -1]) * len(self.depth)
        for key, longer in sorted(self._next.items(), key=lambda entry: self.depth[entry[1]]):
            if state := key >> 32:
                self._shorter[longer] = self.step(self._shorter[state], key & 0xFFFFFFFF)
            self.longest[longer] = longer if longer in ends else self.longest[self._shorter[longer]]

    def step(self, state: int, symbol: int) -> int:
        """The state after one more symbol."""
        while (longer := self._next.get(state << 32 | symbol)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return longer

    def ending(self, state: int) -> Iterator[int]:
        """The states of the patterns that end here, longest first."""
        state = self.longest[state]
        while state >= 0:
            yield state
            state = self.longest[self._shorter[state]] if state else -1

    def _add(self, pattern: Iterable[int]) -> int:
        state = 0
        for symbol in pattern:
            longer = self._next.setdefault(state << 32 | symbol, len(self.depth))
            if longer == len(self.depth):
                self.depth.append(self.depth[state] + 1)
            state = longer
        return state
