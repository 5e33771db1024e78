"""Drafts from a request's own text: what followed the longest suffix that occurred before.

Code edits, quotes, tables and JSON repeat their prompt. A suffix automaton (Blumer et al. 1985) of the prompt and the
answer so far names the longest suffix of the text that occurred before with constant work per token on average, and
memory that is linear in the text. Each request has an automaton of its own, so nothing of one is visible to another.
"""

from __future__ import annotations

from collections.abc import Iterable


class Lookup:
    """The automaton of a growing text. State 0 is the empty suffix."""

    __slots__ = ("_end", "_last", "_length", "_link", "_next", "text")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        # By state: the next states by token, the state of the longest shorter suffix that occurs elsewhere too, the
        # longest text of the state, and the position of the last token of an occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [-1]
        self._last = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text."""
        following, link, length, end, last = self._next, self._link, self._length, self._end, self._last
        for token in tokens:
            if link[last] > 0:
                end[link[last]] = len(self.text) - 1  # the latest occurrence says most of what comes next
            state, place = len(following), last
            following.append({})
            length.append(length[last] + 1)
            end.append(len(self.text))
            link.append(0)
            while place >= 0 and token not in following[place]:
                following[place][token] = state
                place = link[place]
            if place >= 0:
                known = following[place][token]
                if length[known] != length[place] + 1:
                    known = self._split(place, token, known)
                link[state] = known
            self.text.append(token)
            last = state
        self._last = last

    def find(self, most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that followed the longest suffix that occurred before, and its length; 0 if none did.

        Where the earlier occurrence ends less than `most` tokens before the text's end, the tokens found go on as text.
        """
        state = self._link[self._last]
        if state <= 0 or most <= 0:
            return [], 0
        begin, text = self._end[state] + 1, self.text
        found = text[begin : begin + most]
        while len(found) < most:  # the text repeats itself
            found.append(found[begin + len(found) - len(text)])
        return found, self._length[state]

    def _split(self, place: int, token: int, known: int) -> int:
        """Separate the shorter texts of a state, which occur at the new end too."""
        following, link = self._next, self._link
        state = len(following)
        following.append(dict(following[known]))
        link.append(link[known])
        self._length.append(self._length[place] + 1)
        self._end.append(self._end[known])
        link[known] = state
        while place >= 0 and following[place].get(token) == known:
            following[place][token] = state
            place = link[place]
        return state
